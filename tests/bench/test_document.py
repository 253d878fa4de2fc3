"""docs/benchmarks.md names what there is, and takes the figures."""

import importlib.util
from pathlib import Path

import pytest

from swa_compile.bench.configs import CONFIGS
from swa_compile.bench.render import markdown
from swa_compile.bench.variants import VARIANTS

from .rows import record, step_row

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fill", ROOT / "benchmarks/fill.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_configuration_and_variant_is_described():
    for name in [*CONFIGS, *VARIANTS]:
        assert f"`{name}`" in DOCUMENT, name


def test_figures_take_the_place_of_those_that_stood_there(script):
    first = markdown(record(**{"steps/x": step_row()}))
    second = markdown(record(**{"steps/x": step_row(inductor=1.5)}))
    once = script.fill(DOCUMENT, first)
    assert "1.250 (" in once and "Run the first command" not in once
    twice = script.fill(once, second)
    assert "1.500 (" in twice and "1.250 (" not in twice
    assert twice.partition(script.BEGIN)[0] == DOCUMENT.partition(script.BEGIN)[0]


@pytest.mark.parametrize(
    ("told", "reason"),
    [({"cuda": None}, "is of a CPU"), ({"options": {"runs": 10}}, "10 samples of each")],
)
def test_what_is_no_figure_is_kept_out_of_the_page(script, told, reason, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(DOCUMENT)
    results = record(**{"steps/x": step_row()})
    results.about = {**results.about, "options": {"runs": 60}, **told}
    results.path = tmp_path / "results.json"
    results.write()
    monkeypatch.setattr("sys.argv", ["fill.py", str(results.path), str(page)])
    with pytest.raises(SystemExit, match=reason):
        script.main()
    assert page.read_text() == DOCUMENT


def test_a_document_without_a_place_for_figures_is_refused(script):
    with pytest.raises(ValueError, match="figures: begin"):
        script.fill("# Benchmarks\n", "| |")
