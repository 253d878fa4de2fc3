"""The page in windows of any size and in both colour schemes: all of it is there, and readable."""

import itertools
import json
import shutil

import pytest

from swa_compile.passes.graph_file import read_graph, write_graph
from swa_compile.viewer.overview import overview
from swa_compile.viewer.page import write_page

pytestmark = pytest.mark.browser

STAGES = ["captured", "functional", "lifted", "hoisted", "lowered", "fused", "final"]
SIZES = [(1920, 1080), (1280, 800), (1241, 800), (1000, 700), (800, 600), (390, 844)]


@pytest.fixture(scope="module")
def full_dump(model_dump, tmp_path_factory):
    """With every stage and every figure that there can be."""
    folder = tmp_path_factory.mktemp("full") / "graph-000"
    shutil.copytree(model_dump, folder)
    data = read_graph(folder)
    nodes = {stage["name"]: stage["nodes"] for stage in data["stages"]}
    same = {"lifted": "functional", "fused": "lowered", "final": "lowered"}
    data["stages"] = [
        {"name": name, "file": f"{name}.py", "nodes": nodes[same.get(name, name)]}
        for name in STAGES
    ]
    write_graph(folder, data)
    report = json.loads((folder / "report.json").read_text())
    report |= {"partitions": 49, "cache_copies": 0, "from_cache": True}
    report["values"] *= 4  # a colour each
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "captures.json").write_text(json.dumps({"format": 1, "captures": 9999}))
    write_page(folder)
    return folder


def apart(a, b):
    """True where two boxes have no point in common."""
    return (
        a["x"] + a["width"] <= b["x"]
        or b["x"] + b["width"] <= a["x"]
        or a["y"] + a["height"] <= b["y"]
        or b["y"] + b["height"] <= a["y"]
    )


def boxes(shown, selector):
    return [item.bounding_box() for item in shown.page.locator(selector).all()]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_of_the_page_is_in_the_window_or_can_be_scrolled_to(full_dump, open_page, size):
    shown = open_page(full_dump, size=size)
    width, height = size
    controls = boxes(shown, "#head .brand, .figure, #theme, #tabs button, .stops, #search")
    assert len(controls) == 1 + 9 + 1 + 6 + 1 + 1
    regions = boxes(shown, "#view, #details")
    for box in controls + regions:
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert box["y"] >= 0 and box["y"] + box["height"] <= height
    assert all(apart(a, b) for a, b in itertools.combinations(controls + regions, 2))
    assert all(box["width"] >= 280 and box["height"] >= 120 for box in regions)
    chip = shown.page.locator(".right .chip").last
    chip.click()  # scrolls to it first
    assert "attention" in shown.page.locator("#details .eyebrow").inner_text()
    link = shown.page.locator("#details .link").last
    link.scroll_into_view_if_needed()
    box = link.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] < height


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_names_of_the_stages_stand_below_their_stops_side_by_side(full_dump, open_page, size):
    shown = open_page(full_dump, size=size)
    assert shown.texts("#stops button") == STAGES
    text = """(button) => { const range = document.createRange();
        range.selectNodeContents(button); const box = range.getBoundingClientRect();
        return [box.left, box.right]; }"""
    names = [name.evaluate(text) for name in shown.page.locator("#stops button").all()]
    slider = shown.page.locator("#slider").bounding_box()
    thumb = 16
    for i, (left, right) in enumerate(names):
        stop = slider["x"] + thumb / 2 + (slider["width"] - thumb) * i / (len(STAGES) - 1)
        assert abs((left + right) / 2 - stop) < 2
        assert left >= 0 and right <= size[0]
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(names))


# Of each element with text of its own: its contrast by WCAG 2, with what it lies on mixed in.
CONTRASTS = r"""() => {
  const rgba = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return text.startsWith("color(") ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const luminance = (color) => color.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const canvas = document.body.appendChild(document.createElement("i"));
  canvas.style.backgroundColor = "Canvas";
  const bottom = rgba(getComputedStyle(canvas).backgroundColor);
  canvas.remove();
  const found = [];
  for (const element of document.querySelectorAll("body *:not(script, style, noscript)")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.getBoundingClientRect().width || element.matches(".dim")) continue;
    const around = [];
    for (let at = element; at; at = at.parentElement) around.unshift(getComputedStyle(at));
    const grounds = around.map((style) => rgba(style.backgroundColor));
    const ground = grounds.reduce((below, top) => over(top, below), bottom);
    const [r, g, b, a] = rgba(getComputedStyle(element).color);
    const opacity = around.reduce((product, s) => product * Number(s.opacity), a);
    const [low, high] = [ground, over([r, g, b, opacity], ground)].map(luminance)
      .sort((x, y) => x - y);
    found.push([(high + 0.05) / (low + 0.05), `${element.className}: ${element.textContent}`]);
  }
  return found;
}"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("dump", ["full_dump", "mixed_dump"])
def test_every_text_is_readable(dump, dark, open_page, request):
    """A contrast of 4.5 at least, but for chips that a search puts aside."""
    shown = open_page(request.getfixturevalue(dump), dark=dark)
    seen = 0

    def check():
        nonlocal seen
        contrasts = shown.page.evaluate(CONTRASTS)
        assert [(round(n, 2), what[:60]) for n, what in contrasts if n < 4.5] == []
        seen += len(contrasts)

    check()
    shown.page.locator(".left .chip").first.click()
    check()
    for value in shown.page.locator(".value").all():
        value.click()
        check()
    shown.page.locator("#slider").fill("1")
    check()
    shown.page.locator("#search").fill("o")
    check()
    shown.page.keyboard.press("Escape")
    shown.page.locator(".left .chip").first.click()
    for key in "23456":
        shown.page.keyboard.press(key)
        check()
    assert seen > 500


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_of_graphs_is_readable(scheme, mixed_dump, tmp_path, browser):
    shutil.copytree(mixed_dump, tmp_path / "graph-000")
    (tmp_path / "graph-001").mkdir()
    (tmp_path / "graph-001" / "report.json").write_text("{")
    (tmp_path / "list.html").write_text(overview(tmp_path))
    page = browser.new_page(color_scheme=scheme)
    page.goto((tmp_path / "list.html").as_uri())
    contrasts = page.evaluate(CONTRASTS)
    page.close()
    assert len(contrasts) > 15
    assert [(round(n, 2), what[:60]) for n, what in contrasts if n < 4.5] == []


def test_what_inductor_changes_is_not_ascribed_to_the_passes(full_dump, open_page, tmp_path):
    folder = tmp_path / "graph-000"
    shutil.copytree(full_dump, folder)
    data = read_graph(folder)
    final = data["stages"][-1]
    final["nodes"] = [n for n in final["nodes"] if n["target"] != "swa::paged_attention"]
    write_graph(folder, data)
    write_page(folder)
    shown = open_page(folder, "view=operators")
    row = shown.page.locator("tr", has_text="swa::paged_attention").locator("td")
    assert row.all_inner_texts()[-2:] == ["·", ""]


def test_arrow_keys_in_the_panel_scroll_it(model_dump, open_page):
    shown = open_page(model_dump)
    shown.page.locator('.right .chip[data-node="paged_attention"]').click()
    link = shown.page.locator("#details .link").first
    link.focus()
    shown.page.keyboard.press("ArrowDown")
    assert link.evaluate("link => link === document.activeElement")
