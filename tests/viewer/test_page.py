"""The page in a browser: what it shows and how it answers."""

import json
import shutil
import time

import pytest
import torch

from swa_compile.passes.graph_file import read_graph, write_graph
from swa_compile.viewer.page import write_page

from .conftest import Model, arguments, compile_into

pytestmark = pytest.mark.browser


def test_the_picture_shows_every_call_and_edge(model_dump, open_page):
    shown = open_page(model_dump)
    assert shown.texts(".figure b")[:4] == ["6 → 1", "2", "0", "0"]
    assert shown.texts(".lane .name") == ["0", "1", "2", "3"]
    assert shown.page.locator(".left .chip").count() == 6
    assert shown.texts(".value .loc") == ["loc", "page_table"]
    # From three layers two calls in, to three layers' store and attention out.
    assert shown.page.locator(".edge").count() == 12
    assert shown.page.locator(".apart").count() == 0
    assert [url for url in shown.requests if not url.startswith("file:")] == []


def test_refused_values_stand_apart_with_code_reason_and_source(mixed_dump, open_page):
    shown = open_page(mixed_dump)
    codes = ["LOC_FROM_ACTIVATIONS", "MAPPING_WRITTEN", "MAPPING_WRITTEN"]
    assert sorted(shown.texts(".apart .code")) == codes
    assert sorted(shown.texts("#details .refusal b")) == codes
    assert shown.page.locator(".lane .left .chip.refused").count() == 3
    shown.page.locator(".value.refused", has_text="LOC_FROM_ACTIVATIONS").click()
    panel = shown.page.locator("#details").inner_text()
    assert "depend on floating-point values" in panel and "conftest.py:" in panel
    assert "What to do" in panel


def test_a_click_shows_code_shape_source_and_neighbours(model_dump, open_page):
    shown = open_page(model_dump)
    shown.page.locator('.right .chip[data-node="paged_attention"]').click()
    panel = shown.page.locator("#details").inner_text()
    for text in ("swa::paged_attention", "f32[5, 2, 16]", "layers.0", "conftest.py:"):
        assert text in panel
    assert "torch.ops.swa.paged_attention.default" in shown.texts(".snippet")[0]
    shown.page.locator("#details ul.links .link", has_text="index_put_default").first.click()
    assert shown.page.locator("#details h2").inner_text() == "index_put_default"
    shown.page.keyboard.press("Escape")
    assert shown.page.locator("#details h2").inner_text() == "This graph"


def test_search_finds_exactly_the_nodes_that_hold_the_words(model_dump, open_page):
    shown = open_page(model_dump)
    lowered = next(s for s in read_graph(model_dump)["stages"] if s["name"] == "lowered")
    wanted = [n["name"] for n in lowered["nodes"] if n["target"] == "aten::index_put"]
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("aten::index_put")
    assert shown.page.locator("#hits").inner_text() == f"{len(wanted)} nodes"
    assert shown.page.locator(".chip.hit").count() == 4  # two writes of a layer are one chip
    shown.page.keyboard.press("ArrowDown")
    shown.page.keyboard.press("Enter")
    assert shown.page.locator("#details h2").inner_text() == wanted[1]
    shown.page.locator("#search").fill("no such node")
    assert shown.page.locator("#hits").inner_text() == "0 nodes"


def test_the_slider_goes_through_the_stages_without_moving_the_page(model_dump, open_page):
    shown = open_page(model_dump)
    slider = shown.page.locator("#slider")
    boxes = {
        name: shown.page.locator(name).bounding_box() for name in ("#view", "#details", "#bar")
    }
    seen = {}
    for stop, name in enumerate(("captured", "functional", "hoisted", "lowered")):
        slider.fill(str(stop))
        assert shown.texts("#stops .current") == [name]
        seen[name] = shown.texts('.right .chip[data-at^="a0."]')
        for part, box in boxes.items():
            assert shown.page.locator(part).bounding_box() == box
    assert seen["functional"] == ["⇄ loc", "⇄ page_table", "store_kv", "paged_attention"]
    assert seen["hoisted"] == ["store_kv", "paged_attention"]
    assert seen["lowered"] == ["index_put ×2", "paged_attention"]


def test_every_view_opens(model_dump, open_page):
    shown = open_page(model_dump)
    for key, word in (
        ("2", "02-lowered.py"),
        ("3", "diff-02.txt"),
        ("4", "swa::translate_loc"),
        ("5", "No code was generated"),
        ("6", "torch"),
    ):
        shown.page.keyboard.press(key)
        assert word in shown.page.locator("#view").inner_text()
    shown.page.keyboard.press("4")
    row = shown.page.locator("tr", has_text="swa::translate_loc").locator("td")
    assert row.all_inner_texts() == ["swa::translate_loc", "3", "3", "·", "·", "-3"]


def test_arrow_keys_walk_through_the_lanes(model_dump, open_page):
    shown = open_page(model_dump)

    def focused():
        return shown.page.evaluate("document.activeElement.dataset.at || ''")

    walk = []
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        shown.page.keyboard.press(key)
        walk.append(focused())
    assert walk == ["b0.0", "b0.1", "a0.0", "a1.0", "a2.0", "b2.1"]
    shown.page.keyboard.press("Enter")
    assert shown.page.locator("#details .eyebrow").inner_text().startswith("translation")


def test_dark_and_light_differ_and_can_be_chosen(model_dump, open_page):
    def ground(shown):
        return shown.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = open_page(model_dump), open_page(model_dump, dark=True)
    assert ground(light) != ground(dark)
    light.page.locator("#theme").click()  # from the system's to light
    light.page.locator("#theme").click()
    assert ground(light) == ground(dark)


def test_names_are_shown_and_never_run(model_dump, open_page, tmp_path):
    """Node names, paths, source and a whole file of the dump that would be markup, or end it."""
    evil = "</script><img src=x onerror=alert(1)>{{DATA}}"
    folder = tmp_path / "graph-000"
    shutil.copytree(model_dump, folder)
    data = read_graph(folder)
    for stage in data["stages"]:
        for node in {id(node): node for node in stage["nodes"]}.values():
            if node["kind"] == "attention" and evil not in node["target"]:
                node["target"] += evil
                node["source"] = f"/{evil}.py:3"
    data["stacks"] = [f'  File "/{evil}.py", line 3, in {evil}\n    {evil}'] * len(data["stacks"])
    data["provenance"]["torch"] = evil
    write_graph(folder, data)
    report = json.loads((folder / "report.json").read_text())
    report["values"][0]["loc"] = evil
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "02-lowered.py").write_text(evil + "\n")
    write_page(folder)

    shown = open_page(folder)
    dialogs = []
    shown.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    shown.page.locator('.right .chip[data-node="paged_attention"]').click()
    assert evil in shown.page.locator("#details").inner_text()
    for key in "23456":
        shown.page.keyboard.press(key)
    assert evil in shown.page.locator("#view").inner_text()
    assert dialogs == [] and shown.page.locator("img").count() == 0


def test_a_dump_of_a_pass_that_raised_shows_the_error_and_its_stages(
    model_dump, open_page, tmp_path
):
    folder = tmp_path / "graph-000"
    shutil.copytree(model_dump, folder)
    (folder / "report.json").unlink()
    (folder / "error.txt").write_text("Traceback\nPassError: a KV store was lost\n")
    write_page(folder)
    shown = open_page(folder)
    assert "PassError: a KV store was lost" in shown.page.locator("#details").inner_text()
    assert shown.texts(".figure b") == ["failed"]
    assert shown.page.locator(".left .chip").count() == 6
    assert "undefined" not in shown.page.locator("body").inner_text()


def test_choosing_a_value_ends_the_search(model_dump, open_page):
    shown = open_page(model_dump)
    shown.page.locator("#search").fill("index_put")
    shown.page.locator(".value").first.click()
    assert shown.page.locator("#search").input_value() == ""
    assert shown.page.locator(".chip.dim").count() == 0


def test_the_second_write_of_a_chip_is_found_and_marked_on_it(model_dump, open_page):
    shown = open_page(model_dump)
    lowered = next(s for s in read_graph(model_dump)["stages"] if s["name"] == "lowered")
    second = [n["name"] for n in lowered["nodes"] if n["target"] == "aten::index_put"][1]
    shown.page.locator("#search").fill(f"{second} aten::index_put")
    assert shown.texts("#details .results .link span") == [second]
    assert shown.texts(".chip.hit") == ["index_put ×2"]
    shown.page.keyboard.press("Enter")
    assert shown.texts(".right .chip.chosen") == ["index_put ×2"]


@pytest.mark.parametrize("modifiers", [{"ctrlKey": True, "altKey": True}, {"altKey": True}])
def test_brackets_behind_altgr_or_option_move_through_the_stages(model_dump, open_page, modifiers):
    shown = open_page(model_dump)
    press = """([key, how]) => document.body.dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true, ...how }))"""
    shown.page.evaluate(press, ["[", modifiers])
    assert shown.texts("#stops .current") == ["hoisted"]
    shown.page.evaluate(press, ["2", modifiers])  # a shortcut of somebody else's
    assert shown.page.locator('#tabs [aria-selected="true"]').inner_text() == "Picture"


def test_all_values_are_in_sight_where_there_is_room(mixed_dump, open_page):
    """Of few layers with more values than those take room for."""
    shown = open_page(mixed_dump)
    clip = shown.page.locator(".values").bounding_box()
    assert shown.page.locator(".values .value").count() == 4
    for i in range(4):
        box = shown.page.locator(".values .value").nth(i).bounding_box()
        assert clip["y"] <= box["y"] and box["y"] + box["height"] <= clip["y"] + clip["height"]


@pytest.fixture(scope="module")
def large_dump(tmp_path_factory):
    """96 layers, every sixth full attention."""
    full = tuple(range(5, 96, 6))
    root = tmp_path_factory.mktemp("large")
    return compile_into(root, Model(96, full=full), *arguments(96))


def test_96_layers_are_there_in_two_seconds_and_only_those_in_sight_are_drawn(
    large_dump, open_page
):
    assert (large_dump / "index.html").stat().st_size < 2 * 2**20
    start = time.perf_counter()
    shown = open_page(large_dump)
    ready = time.perf_counter() - start
    painted = shown.page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()"
    )
    assert max(ready, painted / 1e3) < 2
    assert shown.texts(".figure b")[0] == "160 → 1"
    assert shown.page.locator(".lane").count() < 40
    assert "layers below" in shown.page.locator(".more.below").inner_text()
    shown.page.evaluate("document.querySelector('.scroller').scrollTop = 1e6")
    # Not by `wait_for_function`: the page's policy forbids what that evaluates from its second try.
    shown.page.wait_for_selector(".more.below:empty", state="attached")
    assert shown.texts(".lane .name")[-1] == "95"
    assert shown.page.locator(".lane").count() < 40


def test_a_graph_without_anything_to_hoist_has_a_page(dumped, open_page):
    shown = open_page(dumped(lambda x: x + 1, torch.ones(3)))
    assert "No KV store" in shown.page.locator("#view").inner_text()
