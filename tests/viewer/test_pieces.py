"""The pieces of a graph: of code that Inductor really cut, and of other cuts."""

import itertools
import re
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile import capture_file
from swa_compile.captures import Captures, Recorded, Skip
from swa_compile.viewer.layers import Layers
from swa_compile.viewer.pieces import find_pieces
from swa_compile.viewer.records import CAPTURES_FORMAT

from .conftest import ATTENTION, LAYERS, Model, arguments, read_captures


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
    assert f" in {LAYERS + 1} pieces and between them" in shown.texts("#view .file")[0]

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
    around = {"format": CAPTURES_FORMAT, "time": captures["time"], "further_sizes": 0}
    assert captures == {**report.captures.to_dict(), **around}
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
