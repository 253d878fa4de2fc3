"""What is made of a record: verdicts, tables, Markdown, plots."""

import io
import json

import pytest
from rich.console import Console

from swa_compile.bench.plots import NoMatplotlib, plot
from swa_compile.bench.record import Record
from swa_compile.bench.render import markdown, show
from swa_compile.bench.targets import figures, ratio_of

from .rows import ABOUT, record, step_row, timed


def verdicts(**rows):
    return {(f.what, f.where): f for f in figures(record(**rows))}


def of_step(row):
    found = figures(record(**{"steps/x": row}))
    return {f.what: f for f in found}


def test_ratios_are_of_medians_and_their_spread_is_turn_by_turn():
    ratio = ratio_of([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert ratio == {"median": 2.0, "q1": 2.0, "q3": 2.0}


def test_each_ratio_is_held_against_its_target():
    found = of_step(step_row())
    assert {what: f.verdict for what, f in found.items()} == {
        "naive (c) / ours, full graph": "met",  # 1.25
        "hand-hoisted (e) / ours": "met",  # 1.1
        "plain aten (d) / ours": "missed",  # 1.0
        "eager hand-hoisted (b) / ours": "met",  # 3
        "stock piecewise (f) / ours piecewise, wall": "met",  # 3.01 / 1.06
        "ours piecewise / ours full, wall": "met",  # 1.05
        "launches per layer, ours and (e)": "met",  # 48 / 60
        "cache-sized allocations in compiled code": "met",
        "translation kernels per forward": "met",
    }
    assert found["naive (c) / ours, full graph"].value.startswith("1.250 (")
    assert found["launches per layer, ours and (e)"].value == "12.0 and 15.0"


def test_the_target_of_the_naive_variant_is_another_at_64():
    assert of_step(step_row(inductor=1.16))["naive (c) / ours, full graph"].verdict == "missed"
    row = step_row(batch=256, inductor=1.16)
    assert of_step(row)["naive (c) / ours, full graph"].verdict == "met"


def test_ratios_of_another_model_than_the_reference_are_shown_without_a_verdict():
    found = of_step({**step_row(), "config": "gpt-oss-20b"})
    assert {what: f.verdict for what, f in found.items() if " / " in what} == {
        "naive (c) / ours, full graph": "",
        "hand-hoisted (e) / ours": "",
        "plain aten (d) / ours": "",
        "eager hand-hoisted (b) / ours": "",
        "stock piecewise (f) / ours piecewise, wall": "",
        "ours piecewise / ours full, wall": "",
    }
    assert found["naive (c) / ours, full graph"].value.startswith("1.250 (")
    assert found["translation kernels per forward"].verdict == "met"


def test_a_wrong_variant_gives_no_figure():
    found = of_step(step_row(**{"inductor-hoisted": None}))
    figure = found["hand-hoisted (e) / ours"]
    assert (figure.value, figure.verdict) == ("inductor-hoisted: wrong", "")
    assert "launches per layer, ours and (e)" not in found


def test_our_own_capture_stands_for_us_where_it_runs():
    found = of_step(step_row(**{"swa-full": 0.5}))
    assert found["naive (c) / ours, full graph"].value.startswith("2.5")


def test_no_gpu_no_verdict():
    made = record(**{"steps/x": step_row()})
    del made.about["cuda"]
    assert all(figure.met is None for figure in figures(made))


STORES = {
    "batch": 64,
    "calls": 20,
    "compilations": 2,
    "ways": {
        "no store": {"us": timed(2.0), "launches": 4.0},
        "ours 1": {"us": timed(2.5), "launches": 2.0},
        "ours 2": {"us": timed(9.0), "launches": 2.0},
    },
    "ours_us": {"median": 5.75, "min": 2.5, "max": 9.0},
}
PROLOGUE = {
    "table_mb": 134.2,
    "tables": {
        "runs of 64 ids": {"ratio": {"median": 1.2, "q1": 1.1, "q3": 1.3}},
        "ids at random": {"ratio": {"median": 3.4, "q1": 3.3, "q3": 3.5}},
    },
}
START = {
    "config": "ref24",
    "batch": 64,
    "cold": {"seconds": 40.0},
    "warm": {"seconds": 8.0, "from_cache": True},
    "ratio": 0.2,
    "passes_share": 0.03,
    "plain": {"cold": {"seconds": 30.0}, "warm": {"seconds": 9.0}, "ratio": 0.3},
}
DEPTH = {
    "depths": [
        {"layers": n, "mapping_kernels": 1, "mapping_kernels_late": 0, "launches": 10 * n}
        for n in (1, 24, 96)
    ]
}
PASSES = {
    "depths": [
        {"layers": 32, "nodes": 3000, "us_per_node": 40.0},
        {"layers": 192, "nodes": 20_100, "us_per_node": 60.0},
    ]
}
SIZES = {"sizes": [0, 1, 2, 8, 64], "compilations": {"default": 4, "mark_sizes": 1}}


def test_one_bad_choice_of_blocks_in_ten_misses():
    (figure, launches) = verdicts(**{"stores/B64": STORES}).values()
    assert figure.verdict == "missed" and figure.value == "5.75 (2.50 - 9.00)"
    assert launches.verdict == "met"


def test_the_further_figures():
    found = figures(
        record(
            **{
                "prologue/B256/P131072": PROLOGUE,
                "start": START,
                "depth": DEPTH,
                "passes": PASSES,
                "sizes": SIZES,
            }
        )
    )
    assert [(f.what.partition(":")[0], f.verdict) for f in found] == [
        ("prologue / copying its bytes", "met"),
        ("prologue / copying its bytes", "missed"),
        ("translation kernels per forward", "met"),
        ("warm start / cold start", "met"),
        ("warm start / cold start, plain torch.compile (c)", ""),
        ("passes / cold compile", "missed"),
        ("passes' time per node, deepest / shallowest", "missed"),
        ("compilations", "met"),
    ]


def test_a_warm_start_that_found_no_cache_is_not_met():
    cold = {**START, "warm": {"seconds": 8.0, "from_cache": False}}
    assert figures(record(start=cold))[0].verdict == "missed"


def whole_record():
    return record(
        **{
            "steps/ref24/B64/W128/C128": step_row(**{"swa-full": None}),
            "stores/B64": STORES,
            "start": {"error": "RuntimeError: out of stamps"},
        }
    )


def test_the_terminal_shows_versions_figures_kernels_and_what_failed():
    out = io.StringIO()
    show(Console(file=out, width=200), whole_record())
    text = out.getvalue()
    for words in (
        "Abacus 9000, CUDA 13.0, torch 2.11.0",
        "plain aten (d) / ours",
        "missed",
        "wrong: layer 3 | row 7",
        "Kernels of one step",
        "out of stamps",
        "ours 2",
    ):
        assert words in text, words


def test_markdown_has_whole_rows():
    text = markdown(whole_record())
    for table in text.split("###")[1:]:
        rows = [line for line in table.splitlines() if line.startswith("|")]
        widths = {line.replace("\\|", "").count("|") for line in rows}
        assert len(widths) == 1, table
    assert r"layer 3 \| row 7" in text


def test_tables_are_the_same_behind_a_file(tmp_path):
    made = whole_record()
    made.path = tmp_path / "r.json"
    made.write()
    json.loads(made.path.read_text())
    assert markdown(Record.read(made.path)) == markdown(made)


def test_plots_are_images_of_each_step(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [bench] is not installed")
    written = plot(whole_record(), tmp_path / "plots")
    assert [path.name for path in written] == [
        "steps-ref24-B64-W128-C128-times.png",
        "steps-ref24-B64-W128-C128-kernels.png",
    ]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(NoMatplotlib, match=r"pip install 'swa-compile\[bench\]'"):
        plot(Record(dict(ABOUT)), tmp_path)
