"""How much a dump may take, and what is left out beyond."""

from pathlib import Path

import pytest
import torch

from swa_compile.dumping import _add_final
from swa_compile.passes import folder as folder_module
from swa_compile.passes import graph_file
from swa_compile.passes.graph_file import read_graph
from swa_compile.viewer.dump import graph_folders

from .conftest import compile_once


def test_graphs_of_a_process_are_numbered_in_order_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_GRAPHS", 2)
    for _ in range(2):
        compile_once(tmp_path)
    with pytest.warns(UserWarning, match="dumped 2 graphs"):
        result, (report,) = compile_once(tmp_path)
    assert torch.equal(result, torch.tensor([2, 4])) and report.dump is None
    assert [f.name for f in graph_folders(tmp_path)] == ["graph-000", "graph-001"]
    (note,) = tmp_path.glob("pid-*/no-more-graphs.txt")
    assert "2 graphs" in note.read_text()
    assert list(tmp_path.glob("pid-*/.*")) == []


def test_a_file_beyond_the_bound_is_cut_at_a_line_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_BYTES", 100)
    folder_module.write_file(tmp_path / "a.py", "short line é\n" * 40)
    lines = (tmp_path / "a.py").read_text().splitlines()
    assert set(lines[:-1]) == {"short line é"} and len(lines) == 8
    assert lines[-1] == f"# cut here: {7 * 14} of {40 * 14} bytes are shown (the bound is 100)"


def test_nodes_beyond_the_bound_are_left_out_by_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_file, "MAX_BYTES", 4000)
    (report,) = compile_once(tmp_path)[1]
    data = read_graph(Path(report.dump))
    assert data["omitted"] and {s["name"] for s in data["stages"]}.isdisjoint(data["omitted"])
    assert {*data["omitted"], *(s["name"] for s in data["stages"])} == {
        *("captured", "functional", "hoisted", "lowered"),
    }


def test_nodes_that_fit_to_the_byte_are_kept_and_what_does_not_fit_leaves_valid_json(
    tmp_path, monkeypatch
):
    stage = {"name": "x" * 300, "file": "f", "nodes": []}
    data = {"format": 1, "stages": [stage], "stacks": ["y" * 900], "answers": []}
    graph_file.write_graph(tmp_path, data)
    size = (tmp_path / "graph.json").stat().st_size
    for bound, kept in ((size, [stage]), (size - 1, [])):
        for module in (graph_file, folder_module):
            monkeypatch.setattr(module, "MAX_BYTES", bound)
        graph_file.write_graph(tmp_path, data)
        assert read_graph(tmp_path)["stages"] == kept
    for module in (graph_file, folder_module):
        monkeypatch.setattr(module, "MAX_BYTES", 600)  # without stages, stacks are of no use
    graph_file.write_graph(tmp_path, data)
    assert read_graph(tmp_path)["omitted"] == ["x" * 300]


def test_the_final_stage_has_its_own_files_where_stages_are_left_out(tmp_path):
    """Its number follows theirs, and what it is compared with is the text of the last."""
    nodes = [{"name": "x", "op": "placeholder", "target": "x", "kind": "input"}]
    first = {"name": "functional", "file": "00-functional.py", "nodes": nodes}
    data = {"format": 1, "stages": [first], "omitted": ["hoisted", "lowered"], "stacks": []}
    (tmp_path / "02-lowered.py").write_text("as it was lowered\n")
    (tmp_path / "diff-01.txt").write_text("of the passes\n")
    _add_final(tmp_path, data, torch.fx.symbolic_trace(torch.nn.Identity()))
    assert data["stages"][-1]["file"] == "03-final.py" and (tmp_path / "03-final.py").exists()
    assert (tmp_path / "diff-01.txt").read_text() == "of the passes\n"
    assert "-as it was lowered" in (tmp_path / "diff-03.txt").read_text()
