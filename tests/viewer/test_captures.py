"""What was captured of a graph: in `captures.json`, in the page and in the terminal."""

import json

import pytest

import swa_compile
from swa_compile import capture_file
from swa_compile.captures import Captures, Recorded, Skip
from swa_compile.narrating import narrate_graph
from swa_compile.viewer import page as page_module
from swa_compile.viewer.dump import Dump
from swa_compile.viewer.page import page, write_page

from .conftest import ATTENTION, LAYERS


def test_a_bucket_is_written_when_it_comes_out_in_another_way_and_only_then():
    written, captures = [], Captures("piecewise", pieces=2)
    captures.write_with(lambda: written.append(dict(captures.recorded)))
    captures.note("4 tokens", Recorded(pieces=(0, 1)))
    captures.note("4 tokens", Recorded(pieces=(0, 1)))
    captures.note("4 tokens", Recorded(pieces=(1,)))
    pieces = [[r.pieces for r in recorded.values()] for recorded in written]
    assert pieces == [[], [(0, 1)], [(1,)]]


def test_a_page_that_gets_captures_is_the_page_that_is_made_with_them(cut_dump):
    """Also when it is brought up to date a second time, and a page that is made on demand."""
    folder = cut_dump([0, ATTENTION, 1])
    captures = Captures("auto", pieces=2)
    capture_file.copy_to(folder, captures)
    captures.note("</script> {{DATA}}", Recorded(whole=True))
    assert (folder / "index.html").read_text() == page(Dump.read(folder))


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


def test_explain_tells_how_many_graphs_there_are_and_what_was_skipped():
    captures = Captures(captures=7)
    captures.skip(Skip("piece 3 runs uncaptured: its sizes depend on data", source="m.py:3"))
    lines = narrate_graph(swa_compile.GraphReport(captures=captures))
    assert any(line.split()[:3] == ["7", "CUDA", "graphs"] for line in lines)
    assert any("CAPTURE_SKIPPED at m.py:3: piece 3 runs uncaptured" in line for line in lines)
    assert not any("CUDA graphs" in line for line in narrate_graph(swa_compile.GraphReport()))


def test_the_page_is_rewritten_in_place_without_being_made_again(cut_dump, monkeypatch):
    folder = cut_dump([0, ATTENTION, 1])
    monkeypatch.setattr(page_module, "page", None)  # would be called
    captures = Captures()
    capture_file.copy_to(folder, captures)
    captures.note("4 tokens", Recorded(whole=True))
    assert "4 tokens" in (folder / "index.html").read_text()
