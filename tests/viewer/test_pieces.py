"""Pieces and captures: of code that Inductor really cut, in the page and in `captures.json`."""

import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile import capture_file
from swa_compile.captures import Captures, Recorded, Skip
from swa_compile.capturing import Capturing
from swa_compile.narrating import narrate_graph
from swa_compile.passes import folder as folder_module
from swa_compile.viewer import page as page_module
from swa_compile.viewer.dump import Dump, graph_folders
from swa_compile.viewer.layers import Layers
from swa_compile.viewer.page import page, write_page
from swa_compile.viewer.pieces import find_pieces

from .conftest import Model, arguments

LAYERS = 4


def compile_pieces(root, calls=4, **options):
    """Compile a model of four layers and call it; what was compiled and its one report."""
    chosen = {"dump_dir": str(root), "cudagraphs": "piecewise", **options}
    compiled = torch.compile(Model(LAYERS, (1,)), backend="swa", fullgraph=True, options=chosen)
    args = arguments(LAYERS)
    with torch.no_grad(), swa_compile.collect() as reports:
        for _ in range(calls):
            compiled(*args)
    (report,) = reports
    return compiled, args, report


def read_captures(report):
    (folder,) = graph_folders(Path(report.dump))
    return json.loads((folder / "captures.json").read_text())


@pytest.mark.inductor
@pytest.mark.browser
def test_pieces_of_real_code_are_bands_between_the_attention_calls(on_cpu, tmp_path, open_page):
    compiled, args, report = compile_pieces(tmp_path)
    assert report.partitions == LAYERS + 1 and len(on_cpu) == 1
    folder = Path(report.dump)
    code = (folder / "03-inductor.py").read_text()
    defined = re.findall(r"^\s*def partition_(\d+)\(", code, re.M)
    assert sorted(map(int, defined)) == list(range(LAYERS + 1))

    shown = open_page(folder)
    bands = shown.page.locator(".band")
    assert shown.texts(".band") == ["P0", "P1", "P2", "P3", "P4"]
    # From top to bottom: a band, an attention call in its layer's lane, a band, ...
    boxes = [bands.nth(i).bounding_box() for i in range(LAYERS + 1)]
    cuts = [shown.page.locator(".cut").nth(i).bounding_box() for i in range(LAYERS)]
    lanes = [shown.page.locator(".lane").nth(i).bounding_box() for i in range(LAYERS)]
    for above, cut, below, lane in zip(boxes, cuts, boxes[1:], lanes, strict=False):
        assert above["y"] + above["height"] <= cut["y"]
        assert cut["y"] + cut["height"] <= below["y"]
        assert lane["y"] < cut["y"] < lane["y"] + lane["height"]
    assert boxes[0]["y"] >= lanes[0]["y"]
    assert boxes[-1]["y"] + boxes[-1]["height"] <= lanes[-1]["y"] + lanes[-1]["height"]
    assert shown.page.locator(".band.captured").count() == LAYERS + 1

    # A click shows the piece: its code, its kernels, where it begins and ends, its captures.
    for number in range(LAYERS + 1):
        bands.nth(number).click()
        function = re.search(rf"^def partition_{number}\(.*\n(?:(?: .*)?\n)*", code, re.M)[0]
        snippet = shown.page.locator("#details .snippet").text_content()
        assert snippet.strip() == function.strip()
        kernels = shown.texts("#details ul.links .link")
        assert kernels and all(f"{name}(" in function for name in kernels)
        panel = shown.page.locator("#details").inner_text()
        assert ("start of the graph" in panel) == (number == 0)
        assert ("end of the graph" in panel) == (number == LAYERS)
        assert "5 tokens" in panel and "not captured" not in panel
    shown.page.locator("#details .link", has_text="03-inductor.py").click()
    marked = shown.page.locator(".line.marked .text").inner_text()
    assert marked == "def partition_4(args):"

    # An operator between two is the node of its layer; the keyboard goes through the bands.
    shown.page.keyboard.press("1")
    shown.page.locator(".cut").nth(1).click()
    assert shown.page.locator("#details h2").inner_text() == "paged_attention_1"
    bands.nth(1).click()
    shown.page.keyboard.press("ArrowDown")
    assert shown.page.locator("#details h2").inner_text() == "P2"
    assert shown.page.evaluate("document.activeElement.dataset.piece") == "2"
    shown.page.keyboard.press("Escape")

    captures = read_captures(report)
    assert captures["recorded"] == {
        "5 tokens": {"whole": False, "pieces": [0, 1, 2, 3, 4], "direct": True}
    }
    counted = [captures[key] for key in ("captures", "replays", "uncaptured")]
    assert counted == [LAYERS + 1, 3, 1]
    panel = shown.page.locator("#details").inner_text()
    assert "5 of 5 pieces" in panel and captures["time"] in panel

    # A replay leaves the folder alone; the counts are there when the process is done with it.
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with torch.no_grad():
        for _ in range(3):
            compiled(*args)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert report.captures.replays == 6
    report.captures.write()
    assert read_captures(report)["replays"] == 6
    assert '"replays":6' in (folder / "index.html").read_text()


@pytest.mark.inductor
@pytest.mark.browser
def test_whole_calls_are_a_bar_along_all_layers(on_cpu, tmp_path, open_page):
    _, _, report = compile_pieces(tmp_path, cudagraphs="full")
    shown = open_page(Path(report.dump))
    assert report.partitions is None and shown.page.locator(".band").count() == 0
    bar = shown.page.locator(".whole").bounding_box()
    lanes = [shown.page.locator(".lane").nth(i).bounding_box() for i in (0, LAYERS - 1)]
    assert bar["y"] - lanes[0]["y"] < 5 and bar["height"] > lanes[1]["y"] - lanes[0]["y"]
    assert "whole call" in shown.page.locator("#details .sizes").inner_text()


def test_a_bucket_is_written_when_it_comes_out_in_another_way_and_only_then():
    written, captures = [], Captures("piecewise", pieces=2)
    captures.write_with(lambda: written.append(dict(captures.recorded)))
    captures.note("4 tokens", Recorded(pieces=(0, 1)))
    captures.note("4 tokens", Recorded(pieces=(0, 1)))
    captures.note("4 tokens", Recorded(pieces=(1,)))
    pieces = [[r.pieces for r in recorded.values()] for recorded in written]
    assert pieces == [[], [(0, 1)], [(1,)]]


@pytest.fixture
def cut_dump(model_dump, tmp_path):
    """cut_dump(order) -> folder: four layers, and code that calls pieces and operators so."""

    def make(order):
        folder = tmp_path / "graph-000"
        shutil.copytree(model_dump, folder)
        calls = "".join(
            f"        (b{i},) = self.partitions[{item}](args)\n"
            if isinstance(item, int)
            else f"        c{i} = torch.ops.{item}(b{i - 1})\n"
            for i, item in enumerate(order)
        )
        code = f"class Runner:\n    def call(self, args):\n{calls}        return (b0, )\n"
        (folder / "03-inductor.py").write_text(code)
        write_page(folder)
        return folder

    return make


ATTENTION = "swa.paged_attention.default"


@pytest.mark.browser
def test_pieces_at_other_cuts_share_the_room_between_known_ones(cut_dump, open_page):
    """Two pieces in a row, and an operator that no stage has: in order, and none on another."""
    order = [0, ATTENTION, 1, 2, ATTENTION, 3, "mine.log.default", 4, ATTENTION, ATTENTION, 5]
    shown = open_page(cut_dump(order))
    assert shown.texts(".band") == ["P0", "P1", "P2", "P3", "P4", "P5"]
    boxes = [shown.page.locator(".band").nth(i).bounding_box() for i in range(6)]
    for above, below in itertools.pairwise(boxes):
        assert above["y"] + above["height"] <= below["y"]
    assert shown.page.locator(".cut").count() == 4
    assert shown.page.locator(".band.open").count() == 6
    shown.page.locator("#slider").fill("2")  # ahead of the code
    assert shown.page.locator(".band").count() == 0


@pytest.mark.browser
def test_pieces_without_any_known_cut_are_not_placed(cut_dump, open_page):
    shown = open_page(cut_dump([0, "mine.log.default", 1]))
    assert shown.page.locator(".strip").count() == 0


@pytest.mark.browser
def test_a_piece_that_is_not_captured_says_why(cut_dump, open_page):
    folder = cut_dump([0, ATTENTION, 1, ATTENTION, 2, ATTENTION, 3, ATTENTION, 4])
    captures = Captures("piecewise", pieces=5)
    captures.note("4 tokens", Recorded(pieces=(0, 1, 2, 3, 4)))
    captures.note("8 tokens", Recorded(pieces=(0, 1, 2, 4)))
    why = "piece 3 runs uncaptured: </script><b id=evil>its sizes depend on data"
    captures.skip(Skip(why, tokens=8))
    capture_file.copy_to(folder, captures)
    shown = open_page(folder)
    assert [b.split()[1] for b in shown.page.locator(".band").evaluate_all(
        "bands => bands.map((band) => band.className)")] == [
        "captured", "captured", "captured", "partly", "captured",
    ]  # fmt: skip
    shown.page.locator('.band[data-piece="3"]').click()
    assert why in shown.page.locator("#details").inner_text()
    assert shown.page.locator("#evil").count() == 0
    shown.page.locator('.band[data-piece="2"]').click()
    assert why not in shown.page.locator("#details").inner_text()


def test_a_page_that_gets_captures_is_the_page_that_is_made_with_them(cut_dump):
    """Also when it is brought up to date a second time, and a page that is made on demand."""
    folder = cut_dump([0, ATTENTION, 1])
    captures = Captures("auto", pieces=2)
    capture_file.copy_to(folder, captures)
    captures.note("</script> {{DATA}}", Recorded(whole=True))
    assert (folder / "index.html").read_text() == page(Dump.read(folder))


UNREADABLE = [b'{"mode": "au', b"%%%", b"", b"[]", b"3", b'{"recorded": [1]}', b"\xff\xfe\0"]
UNREADABLE.append(json.dumps({"format": 2, "buckets": []}).encode())


@pytest.mark.browser
def test_captures_that_cannot_be_read_are_named_and_the_rest_is_shown(
    model_dump, tmp_path, open_page
):
    for i, text in enumerate(UNREADABLE):
        folder = tmp_path / f"graph-{i:03d}"
        shutil.copytree(model_dump, folder)
        (folder / "captures.json").write_bytes(text)
        write_page(folder)
        shown = open_page(folder)
        assert shown.page.locator(".lane").count() == LAYERS
        assert "captures.json" in shown.page.locator("#details .refusal").inner_text()
        assert shown.texts(".figure b")[0] == "6 → 1"
        assert "CUDA graphs" not in shown.texts(".figure span")


@pytest.mark.browser
def test_captures_without_some_keys_are_as_if_those_had_not_happened(cut_dump, open_page):
    folder = cut_dump([0, ATTENTION, 1])
    some = {"captures": 3, "recorded": {"4 tokens": {"pieces": [1]}}, "later": {"a": 1}}
    (folder / "captures.json").write_text(json.dumps(some))
    write_page(folder)
    shown = open_page(folder)
    assert "1 of 0 pieces" in shown.page.locator("#details .sizes").inner_text()
    assert "later" not in (folder / "index.html").read_text().split("</script>")[0]


@pytest.mark.browser
def test_strings_of_captures_are_shown_as_they_are(cut_dump, open_page):
    """Markup, quotes, line ends of JavaScript, other scripts, and too long to fit."""
    order = [x for n in range(LAYERS) for x in (n, ATTENTION)] + [LAYERS]
    folder, captures = cut_dump(order), Captures(pieces=LAYERS + 1)
    evil = "</script><b id=evil>\"'\\u2028\u2029<!--<script>é漢字" + "x" * 3000
    captures.note(evil, Recorded(pieces=(0,)))
    captures.skip(Skip(evil, source=evil))
    capture_file.copy_to(folder, captures)
    shown = open_page(folder)
    panel = shown.page.locator("#details")
    assert shown.page.locator("#evil").count() == 0
    for _ in range(2):
        assert evil in panel.locator("td").first.text_content()
        assert panel.evaluate("box => box.scrollWidth <= box.clientWidth")
        shown.page.locator(".band").first.click()


@pytest.mark.browser
def test_many_sizes_are_bounded_in_the_dump_and_quick_in_the_page(cut_dump, open_page):
    sizes = capture_file.SIZES + 7
    order = [x for n in range(LAYERS) for x in (n, ATTENTION)] + [LAYERS]
    folder, captures = cut_dump(order), Captures(pieces=LAYERS + 1)
    for n in range(sizes):
        captures.recorded[f"{n} tokens"] = Recorded(whole=n % 2 == 0, pieces=(0, 2) * (n % 2))
        captures.memory[f"{n} tokens"] = 4096
    capture_file.copy_to(folder, captures)
    written = json.loads((folder / "captures.json").read_text())
    assert len(written["recorded"]) == capture_file.SIZES == len(written["memory"])
    assert written["further_sizes"] == 7
    assert (folder / "captures.json").read_text().count("\n") < 2 * sizes + 100
    shown = open_page(folder)
    assert shown.page.locator("#details .sizes tr").count() == capture_file.SIZES
    assert "and 7 more sizes" in shown.page.locator("#details").inner_text()
    kinds = shown.page.locator(".band").evaluate_all("all => all.map((b) => b.classList[1])")
    assert kinds == ["captured", "not", "captured", "not", "not"]
    assert len(shown.page.locator(".whole").get_attribute("title")) < 300


def test_a_full_disk_leaves_the_last_copy_and_it_goes_on_afterwards(cut_dump, monkeypatch):
    folder, captures = cut_dump([0, ATTENTION, 1]), Captures()
    capture_file.copy_to(folder, captures)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "replace", full)
        with pytest.warns(UserWarning, match="No space left") as said:
            captures.note("4 tokens", Recorded(whole=True))
    assert [str(w.message) for w in said] == [
        f"dump file {folder / 'captures.json'} was not written: [Errno 28] No space left on device"
    ]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    captures.write()
    assert "4 tokens" in (folder / "captures.json").read_text()
    assert "4 tokens" in (folder / "index.html").read_text()


def test_a_folder_that_is_read_only_is_said_in_the_same_words_every_time(cut_dump, monkeypatch):
    """So that the warning is shown once, and not for each size."""
    folder, captures = cut_dump([0, ATTENTION, 1]), Captures()
    capture_file.copy_to(folder, captures)
    monkeypatch.setattr(capture_file.os, "access", lambda path, mode: False)
    said = []
    for n in range(3):
        with pytest.warns(UserWarning, match=r"captures\.json was not written") as warned:
            captures.note(f"{n} tokens", Recorded(whole=True))
        said += [str(warning.message) for warning in warned]
    assert len(said) == 3 and len(set(said)) == 1


def test_a_record_that_another_thread_adds_to_can_be_written():
    """A dict that grows while it is copied would raise."""
    captures, stop, failed = Captures(), threading.Event(), []

    def add():
        for n in itertools.count():
            if stop.is_set():
                return
            captures.memory[f"{n % 5000} tokens"] = n
            captures.recorded[f"{n} tokens"] = Recorded()
            if n % 3000 == 2999:
                captures.recorded.clear()
                captures.memory.clear()

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(150):
            captures.to_dict()
    except RuntimeError as error:
        failed.append(error)
    finally:
        stop.set()
        thread.join()
    assert failed == []


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(cut_dump):
    """What it leaves besides is hidden, and no file of the dump to a reader."""
    folder = cut_dump([0, ATTENTION, 1])
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from swa_compile.capture_file import copy_to\n"
        "from swa_compile.captures import Captures, Recorded\n"
        "captures, n = Captures(), 0\n"
        "copy_to(Path(sys.argv[1]), captures)\n"
        "print('writing', flush=True)\n"
        "while True:\n"
        "    n += 1\n"
        "    captures.note(f'{n % 400} tokens', Recorded(pieces=tuple(range(n % 97))))\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            until = time.monotonic() + 1
            while time.monotonic() < until:  # somebody who reads meanwhile
                dump = Dump.read(folder)
                assert dump.captures and not dump.captures_error
                assert (folder / "index.html").read_text().endswith("</html>\n")
        finally:
            process.kill()
    (folder / ".captures.json-abc").write_text("{")  # as if it had been killed there
    dump = Dump.read(folder)
    assert dump.captures["recorded"] and not dump.captures_error
    assert not any(name.startswith(".") for name in dump.texts)
    assert (folder / "index.html").read_text().endswith("</html>\n")


def test_explain_tells_how_many_graphs_there_are_and_what_was_skipped():
    captures = Captures(captures=7)
    captures.skip(Skip("piece 3 runs uncaptured: its sizes depend on data", source="m.py:3"))
    lines = narrate_graph(swa_compile.GraphReport(captures=captures))
    assert any(line.split()[:3] == ["7", "CUDA", "graphs"] for line in lines)
    assert any("CAPTURE_SKIPPED at m.py:3: piece 3 runs uncaptured" in line for line in lines)
    assert not any("CUDA graphs" in line for line in narrate_graph(swa_compile.GraphReport()))


def test_captures_of_a_folder_that_is_gone_or_cannot_be_written(cut_dump, monkeypatch):
    folder, captures = cut_dump([0, ATTENTION, 1]), Captures()
    capture_file.copy_to(folder, captures)

    def fail(*args):
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(capture_file, "put_captures", fail)
        with pytest.warns(UserWarning, match=r"captures\.json was not written.*broken on purpose"):
            captures.write()
    shutil.rmtree(folder)
    captures.write()
    assert not folder.exists()


def test_the_last_counts_are_written_when_the_graph_goes(cut_dump):
    """By a finalizer, which knows the record and not the graph."""
    report = swa_compile.GraphReport(dump=str(cut_dump([0, ATTENTION, 1])))

    class Graph:
        captures = Captures()

    graph = Graph()
    Capturing(None, None, None, None, None, [graph], [graph.captures]).attach([report])
    graph.captures.replays = 77
    assert read_captures(report)["replays"] == 0
    del graph
    gc.collect()
    assert read_captures(report)["replays"] == 77


def test_the_last_counts_are_written_when_the_process_ends(tmp_path):
    (tmp_path / "report.json").write_text("{}")
    program = (
        "import sys, torch, swa_compile\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from swa_compile.captures import Captures\n"
        "from swa_compile.capturing import Capturing\n"
        "class Graph: captures = Captures()\n"
        "graph = Graph()\n"
        "report = swa_compile.GraphReport(dump=sys.argv[1])\n"
        "Capturing(None, None, None, None, None, [graph], [graph.captures]).attach([report])\n"
        "graph.captures.replays = 5\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ})
    assert json.loads((tmp_path / "captures.json").read_text())["replays"] == 5


def test_pieces_have_the_lines_of_their_functions():
    code = (
        "def partition_1(args):\n    a = 1\n\n    return a\n\n\nx = 1\n"
        "    def partition_0(args):\n        b = 2\n    y = 3\n"
    )
    code = code.replace("    def partition_0", "if x:\n    def partition_0")
    code += "class Runner:\n    def call(self, args):\n        self.partitions[0](args)\n"
    code += "        torch.ops.mine.cut.out(args)\n        self.partitions[1](args)\n"
    found = find_pieces(code, [{"name": "cut", "target": "mine::cut.out"}], Layers("order"))
    lines = code.splitlines()
    assert [item.get("operator", item.get("piece")) for item in found] == [0, "mine::cut.out", 1]
    assert found[1]["node"] == "cut" and "layer" not in found[1]
    assert lines[found[0]["line"] - 1 : found[0]["end"]] == [
        "    def partition_0(args):", "        b = 2",
    ]  # fmt: skip
    assert lines[found[2]["line"] - 1 : found[2]["end"]] == [
        "def partition_1(args):", "    a = 1", "", "    return a",
    ]  # fmt: skip


def test_an_operator_that_the_graph_calls_more_often_is_not_told_apart():
    code = "class Runner:\n    def call(self, args):\n        self.partitions[0](args)\n"
    code += "        torch.ops.mine.cut.default(args)\n"
    nodes = [{"name": name, "target": "mine::cut"} for name in ("cut", "cut_1")]
    layers = Layers("order", ["0"], {"cut": 0, "cut_1": 0})
    assert find_pieces(code, nodes, layers)[1] == {"operator": "mine::cut"}
    assert find_pieces(code, nodes[:1], layers)[1] == {
        "operator": "mine::cut", "node": "cut", "layer": 0,
    }  # fmt: skip


def test_the_page_is_rewritten_in_place_without_being_made_again(cut_dump, monkeypatch):
    folder = cut_dump([0, ATTENTION, 1])
    monkeypatch.setattr(page_module, "page", None)  # would be called
    captures = Captures()
    capture_file.copy_to(folder, captures)
    captures.note("4 tokens", Recorded(whole=True))
    assert "4 tokens" in (folder / "index.html").read_text()
