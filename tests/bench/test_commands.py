"""`swa-compile bench` on a CPU, small."""

import json

import pytest
import torch

import swa_compile.cli
from swa_compile.bench.model import natural
from swa_compile.bench.variants import VARIANTS, Variant

SMALL = ["bench", "--config", "small", "--device", "cpu", "--quick", "--batch", "2", "--jobs", "1"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(*args):
    return swa_compile.cli.main([*SMALL, *map(str, args)])


def test_eager_variants_are_timed_and_graphs_say_that_there_is_no_gpu(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "results.json"
    assert bench("--variants", "a", "b", "f", "swa-full", "--json", path, "--runs", 4) == 0
    data = json.loads(path.read_text())
    assert data["schema"] == 1 and data["about"]["torch"] == torch.__version__
    (row,) = data["rows"].values()
    assert list(data["rows"]) == ["steps/small/B2/W16/C32"]
    statuses = {name: entry["status"] for name, entry in row["variants"].items()}
    assert statuses == {
        "eager": "ok",
        "eager-hoisted": "ok",
        "inductor-piecewise": "no GPU",
        "swa-full": "no GPU",
    }
    timed = row["variants"]["eager"]["wall_ms"]
    assert len(timed["samples"]) == 4 and timed["q1"] <= timed["median"] <= timed["q3"]
    assert row["variants"]["eager"]["check"]["tolerance"] == 1e-3
    assert "no GPU: CUDA graphs want a GPU" in capsys.readouterr().out

    stamp = row["date"]
    assert bench("--variants", "a", "--json", path, "--resume") == 0
    assert json.loads(path.read_text())["rows"]["steps/small/B2/W16/C32"]["date"] == stamp
    assert "measured before" in capsys.readouterr().out

    assert swa_compile.cli.main(["bench", "--render", str(path)]) == 0
    assert "| eager (a) |" in capsys.readouterr().out


@pytest.mark.slow
def test_some_rows_of_the_targets_can_be_asked_for(tmp_path):
    path = tmp_path / "results.json"
    assert bench("--targets", "--rows", "passes", "--json", path) == 0
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["passes"] and rows["passes"]["depths"][0]["us_per_node"] > 0


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_variants_are_compared_and_reported(tmp_path):
    path = tmp_path / "results.json"
    assert bench("--variants", "inductor-aten", "swa", "--json", path, "--runs", 3) == 0
    (row,) = json.loads(path.read_text())["rows"].values()
    aten, ours = row["variants"]["inductor-aten"], row["variants"]["swa"]
    assert (aten["status"], ours["status"]) == ("ok", "ok")
    assert ours["check"]["rows"] < 1e-4 and aten["check"]["output"] < 1e-4
    report = ours["report"]
    assert (report["translations_found"], report["translation_nodes"]) == (2, 1)
    assert (report["stores_lowered"], report["cache_copies"]) == (2, 0)


def test_a_wrong_variant_is_an_error_and_no_figure(tmp_path, monkeypatch, capsys):
    def stale(batch):
        loc, table = natural(batch)()
        return lambda: (loc, table.flip(1))

    monkeypatch.setitem(VARIANTS, "stale", Variant("stale", "s", "reads wrong rows", stale))
    path = tmp_path / "results.json"
    assert bench("--variants", "a", "stale", "--json", path) == 1
    (row,) = json.loads(path.read_text())["rows"].values()
    entry = row["variants"]["stale"]
    assert entry["status"] == "wrong" and "output of request" in entry["reason"]
    assert "wall_ms" not in entry and row["variants"]["eager"]["status"] == "ok"
    assert "stale: wrong: batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--variants", "z"], "there is no variant 'z'"),
        (["--window", "0"], "window is at least 1; got 0"),
        (["--context", "4"], "does not fill a window of 16"),
        (["--targets", "--rows", "store", "nonsense"], "no row is called 'nonsense'; the rows are"),
        (["--render", "no/such.json"], "cannot read no/such.json"),
    ],
)
def test_wrong_usage_is_one_line(args, words, capsys):
    assert bench(*args) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_modes_that_this_version_refuses_are_rows_that_say_so(monkeypatch):
    from swa_compile.bench.variants import NotHere, require_available
    from swa_compile.passes import OptionError

    def refuse(options, mode=None):
        raise OptionError(f"cudagraphs={options.cudagraphs!r} is not available")

    monkeypatch.setattr("swa_compile.inductor.config_patches", refuse)
    with pytest.raises(NotHere, match="cudagraphs='piecewise' is not available") as caught:
        require_available(VARIANTS["swa-piecewise"], torch.device("cuda"))
    assert caught.value.kind == "not available"
