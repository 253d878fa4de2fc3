"""The folders of dumps: whole or not visible, and never the end of a compilation."""

import difflib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc
from swa_compile.passes import folder as folder_module
from swa_compile.viewer.dump import Dump, graph_folders

from .conftest import LOC, MAPPING, compile_once, forward


def test_stages_hold_the_nodes_that_their_texts_print(model_dump):
    dump = Dump.read(model_dump)
    assert [s["name"] for s in dump.graph["stages"]] == [
        *("captured", "functional", "hoisted", "lowered"),
    ]
    for stage in dump.graph["stages"]:
        text = dump.texts[stage["file"]]
        printed = re.findall(r"^\s+(\w+)(?:: [^=]*)? = torch\.ops\.swa\.paged_att", text, re.M)
        assert printed == [n["name"] for n in stage["nodes"] if n["kind"] == "attention"]
        for node in stage["nodes"]:
            if node["op"] == "call_function":
                assert re.search(rf"\b{node['name']}\b", text)


def test_the_difference_turns_one_stage_into_the_next(model_dump):
    """Applied by hand: what the two texts share and what the difference adds is the second."""
    for number in (1, 2):
        before, after = sorted(model_dump.glob(f"0{number - 1}-*.py")) + sorted(
            model_dump.glob(f"0{number}-*.py")
        )
        lines = (model_dump / f"diff-0{number}.txt").read_text().splitlines()
        plus = [x[1:] for x in lines if x.startswith("+") and not x.startswith("+++")]
        minus = [x[1:] for x in lines if x.startswith("-") and not x.startswith("---")]
        matched = difflib.SequenceMatcher(
            None, before.read_text().splitlines(), after.read_text().splitlines()
        )
        assert plus or minus
        assert len(after.read_text().splitlines()) - len(before.read_text().splitlines()) == len(
            plus
        ) - len(minus)
        assert matched.ratio() < 1


def test_op_counts_say_what_the_passes_changed(model_dump):
    rows = {
        line.strip("* ").split()[0]: line.split()
        for line in (model_dump / "op-counts.txt").read_text().splitlines()[1:]
    }
    assert rows["swa.translate_loc.default"][-4:] == ["3", "0", "0", "-3"]
    assert rows["swa.translate_many.default"][-3:] == ["0", "1", "0"]
    assert rows["swa.paged_attention.default"][-3:] == ["4", "4", "4"]


def test_a_process_that_is_killed_leaves_no_folder_that_looks_whole(tmp_path):
    """Killed between two stages, the dump is not among the graphs, and no file is half written."""
    program = (
        "import os, torch, swa_compile\n"
        "from swa_compile.ops import translate_loc\n"
        "from swa_compile.passes import dump\n"
        "write = dump.write_file\n"
        "def kill(path, text):\n"
        "    write(path, text)\n"
        "    if path.name.startswith('01-'): os.kill(os.getpid(), 9)\n"
        "dump.write_file = kill\n"
        "f = lambda m, l: translate_loc(m, l) + 1\n"
        f"torch.compile(f, backend='swa_eager', options={{'dump_dir': {str(tmp_path)!r}}})"
        "(torch.arange(9), torch.tensor([1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == -9
    assert graph_folders(tmp_path) == []
    assert list(tmp_path.glob("pid-*/graph-*")) == []
    (left,) = tmp_path.glob("pid-*/.graph-*.part")
    assert (left / "01-hoisted.py").exists()  # it was killed where the test means it to be


def test_the_page_is_written_last(tmp_path, monkeypatch):
    written = []
    real = folder_module.write_file

    def note(path, text):
        written.append(path.name)
        return real(path, text)

    for module in ("swa_compile.passes.dump", "swa_compile.dumping", "swa_compile.viewer.page"):
        monkeypatch.setattr(f"{module}.write_file", note)
    compile_once(tmp_path)
    assert written[-1] == "index.html" and written.count("index.html") == 1


@pytest.mark.parametrize("broken", ["describe", "print_graph", "write_graph"])
def test_whatever_breaks_in_a_dump_is_a_warning(broken, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(f"swa_compile.passes.dump.{broken}", fail)
    with pytest.warns(UserWarning, match="broken on purpose"):
        result, (report,) = compile_once(tmp_path)
    assert torch.equal(result, torch.tensor([2, 4])) and report.translation_nodes == 1


def test_a_page_that_cannot_be_made_is_a_warning_that_names_the_folder(tmp_path, monkeypatch):
    def fail(folder):
        raise RuntimeError("no page today")

    monkeypatch.setattr("swa_compile.dumping.write_page", fail)
    with pytest.warns(UserWarning, match=r"graph-000.*no page today"):
        _, (report,) = compile_once(tmp_path)
    assert (Path(report.dump) / "report.json").exists()


def test_a_pass_that_raises_leaves_its_stages_and_the_error(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("verifier says no")

    # By sys.modules: `swa_compile.passes.pipeline` is the function of that name.
    monkeypatch.setattr(sys.modules["swa_compile.passes.pipeline"], "verify", fail)
    with pytest.raises(Exception, match="verifier says no"):
        compile_once(tmp_path)
    (folder,) = graph_folders(tmp_path)
    dump = Dump.read(folder)
    assert "verifier says no" in dump.texts["error.txt"]
    assert [s["name"] for s in dump.graph["stages"]] == ["functional", "hoisted"]
    assert dump.report == {}


def test_ranks_have_folders_of_their_own_and_stand_in_order(tmp_path, monkeypatch):
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        compile_once(tmp_path)
    names = [folder.parent.name for folder in graph_folders(tmp_path)]
    assert names == [f"pid-{os.getpid()}-rank-{rank}" for rank in (0, 1)]


@pytest.mark.inductor
@pytest.mark.parametrize("lower", [True, False])
def test_the_final_stage_shows_stores_in_place(lower, tmp_path):
    """As Inductor lowers the graph: in place, whether lowered or not, and nothing written back."""
    caches = [torch.zeros(12, 1, 2) for _ in range(2)]

    def store(mapping, loc, k, caches):
        store_kv(*caches, k, -k, translate_loc(mapping, loc))

    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        options = {"dump_dir": str(tmp_path), "lower_stores": lower}
        arguments = (MAPPING, LOC, torch.ones(2, 1, 2), caches)
        torch.compile(store, backend="swa", options=options)(*arguments)
    dump = Dump.read(*graph_folders(tmp_path))
    stage = dump.graph["stages"][-1]
    assert (stage["name"], stage["file"]) == ("final", "03-final.py")
    stores = [node for node in stage["nodes"] if node["kind"] == "store"]
    inputs = {n["name"]: n.get("place") for n in stage["nodes"] if n["kind"] == "input"}
    written = [(node["target"], sorted(inputs[c] for c in node["caches"])) for node in stores]
    if lower:
        assert written == [("aten::index_put_", [3]), ("aten::index_put_", [4])]
        assert "write_back" not in {node["kind"] for node in stage["nodes"]}
    else:
        assert written == [("swa::store_kv", [3, 4])]
    assert any(node.get("prologue") for node in stage["nodes"])
    text = (dump.folder / stage["file"]).read_text()
    assert all(node["name"] in text for node in stores)
    assert (dump.folder / "diff-03.txt").read_text().count("\n+") > 2


@pytest.mark.inductor
def test_a_warm_start_dumps_report_code_and_captured_graph(tmp_path):
    program = (
        "import sys, torch\n"
        "from swa_compile.ops import translate_loc\n"
        "f = lambda m, l: translate_loc(m, l) + translate_loc(m, l)\n"
        "options = {'dump_dir': sys.argv[1]}\n"
        "torch.compile(f, backend='swa', options=options)(torch.arange(9), torch.tensor([1]))\n"
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("cold", "warm"):
        command = [sys.executable, "-c", program, str(tmp_path / name)]
        subprocess.run(command, check=True, env=environment, timeout=200)
    cold, warm = (Dump.read(*graph_folders(tmp_path / name)) for name in ("cold", "warm"))
    assert warm.report["from_cache"] and not cold.report["from_cache"]
    assert [s["name"] for s in warm.graph["stages"]] == ["captured"]
    assert "def call(" in warm.code and (warm.folder / "index.html").exists()
    same = {"translations_found", "translation_nodes", "values", "mapping_kernels"}
    assert all(warm.report[key] == cold.report[key] for key in same)
    page = (warm.folder / "index.html").read_text()
    assert "2 translations became 1 nodes" in page
    name = f"{warm.folder.parent.name}/{warm.folder.name}"
    assert f"<title>{name} - swa_compile</title>" in page and warm.title == name


def test_options_and_versions_are_in_the_dump(dumped):
    folder = dumped(forward, MAPPING, LOC, lower_stores=False)
    data = json.loads((folder / "graph.json").read_text())
    assert data["options"]["backend"]["lower_stores"] is False
    assert data["options"]["passes"]["lower_stores"] is False
    assert data["provenance"]["torch"] == torch.__version__
    assert data["provenance"]["swa-compile"] == swa_compile.__version__
    assert all(stage["seconds"] >= 0 for stage in data["stages"] if stage["name"] != "captured")


def test_no_dump_is_written_and_nothing_is_warned_where_none_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWA_COMPILE_DUMP", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch._dynamo.reset()
        torch.compile(forward, backend="swa_eager")(MAPPING, LOC)
    assert list(tmp_path.iterdir()) == []
