"""The pictures of docs/: `pytest tests/viewer/pictures.py` takes them anew.

Not collected otherwise. Each is taken of a dump that is made here, and shows what its caption says.
"""

from pathlib import Path

import pytest
import torch

from swa_compile.cli import main
from swa_compile.ops import store_kv, translate_loc
from swa_compile.viewer.dump import graph_folders

from .conftest import Model, arguments, compile_into

IMAGES = Path(__file__).parents[2] / "docs" / "images"

pytestmark = [pytest.mark.browser, pytest.mark.inductor]


REFUSED = """
def forward(mapping, draft, loc, x, caches):
    for i, (k, v) in enumerate(caches):
        through, ids = mapping, loc
        if i in (1, 4):
            ids = (x[:, 0, 0].sigmoid() * 90).to(torch.int64)
        if i in (2, 5):
            draft.index_fill_(0, loc[:1], 3)
        if i in (0, 2, 5):
            through = draft
        store_kv(k, v, x, x, translate_loc(through, ids))
        x = x + 1
    return x
"""


@pytest.fixture(autouse=True)
def cold():
    """A graph that comes from the compile cache has no stages to show."""
    with torch._inductor.utils.fresh_cache():
        yield


def take(shown, name):
    shown.page.wait_for_timeout(300)  # transitions
    shown.page.screenshot(path=str(IMAGES / name))


def demo(tmp_path):
    """The dump of the demo's forward."""
    assert main(["demo", "--device", "cpu", "--max-new-tokens", "9", "--dump", str(tmp_path)]) == 0
    return graph_folders(tmp_path)[0]


def test_picture_of_the_demo(tmp_path, open_page):
    shown = open_page(demo(tmp_path))
    assert "12 → 1" in shown.page.locator("header").inner_text().replace("\n", " ")
    take(shown, "picture.png")


def test_picture_of_48_layers(tmp_path, open_page):
    full = tuple(range(5, 48, 6))
    folder = compile_into(tmp_path, Model(48, full), *arguments(48), engine="swa")
    take(open_page(folder, dark=True), "48-layers-dark.png")


def test_picture_of_refusals(tmp_path, open_page):
    scope = {"torch": torch, "store_kv": store_kv, "translate_loc": translate_loc}
    exec(compile(REFUSED, "engine/layers.py", "exec"), scope)
    x, mapping, loc, *_, caches = arguments(6)
    folder = compile_into(tmp_path, scope["forward"], mapping, mapping.clone(), loc, x, caches)
    shown = open_page(folder)
    shown.page.locator(".value.refused", has_text="LOC_FROM_ACTIVATIONS").first.click()
    take(shown, "refusals.png")


def test_picture_of_pieces(on_cpu, tmp_path, open_page):
    chosen = {"dump_dir": str(tmp_path), "cudagraphs": "piecewise"}
    model = Model(12, full=tuple(range(1, 12, 2)))
    compiled = torch.compile(model, backend="swa", fullgraph=True, options=chosen)
    args = arguments(12)
    with torch.no_grad():
        for _ in range(4):
            compiled(*args)
    (folder,) = graph_folders(tmp_path)
    shown = open_page(folder)
    shown.page.locator(".band").nth(3).click()
    assert shown.page.locator(".band.captured").count() == 13
    take(shown, "pieces.png")
