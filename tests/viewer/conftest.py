"""Dumps of small models, and a browser to look at their pages."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table
from swa_compile.viewer.dump import graph_folders
from swa_compile.viewer.page import write_page
from swa_compile.viewer.serve import serve

ROWS, FULL = 24, 96
LAYERS = 4  # of the model of most dumps here
ATTENTION = "swa.paged_attention.default"  # as Inductor's code calls it
MAPPING, LOC = torch.arange(10), torch.tensor([1, 2])


class Attention(torch.nn.Module):
    def __init__(self, sliding: bool) -> None:
        super().__init__()
        self.sliding = sliding

    def forward(self, x, mapping, loc, page_table, seq_lens, cu, k, v):
        if self.sliding:
            loc = translate_loc(mapping, loc)
            page_table = translate_page_table(mapping, page_table, 1)
        store_kv(k, v, x, x * 2, loc)
        return x + paged_attention(x, k, v, page_table, seq_lens, cu, window=4)


class Model(torch.nn.Module):
    """Layers that translate, but for those whose numbers are in `full`."""

    def __init__(self, layers: int, full: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(i not in full) for i in range(layers))

    def forward(self, x, mapping, loc, page_table, seq_lens, cu, caches):
        for layer, (k, v) in zip(self.layers, caches, strict=True):
            x = layer(x, mapping, loc, page_table, seq_lens, cu, k, v)
        return x


def arguments(layers: int):
    """What `Model(layers)` is called with."""
    mapping = torch.cat([torch.arange(FULL) % ROWS, torch.tensor([-1])])
    return (
        torch.ones(5, 2, 16),
        mapping,
        torch.tensor([9, 8, 7, 6, 5]),
        torch.tensor([[9, 8, 7], [6, 5, 0]], dtype=torch.int32),
        torch.tensor([3, 2], dtype=torch.int32),
        torch.tensor([0, 3, 5], dtype=torch.int32),
        [(torch.zeros(ROWS, 2, 16), torch.zeros(ROWS, 2, 16)) for _ in range(layers)],
    )


def compile_into(root: Path, fn, *args, engine: str = "swa_eager", **options) -> Path:
    """Compile and run `fn` once with its dump below `root`; the folder of the one graph."""
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(
            fn, backend=engine, fullgraph=True, options={"dump_dir": str(root), **options}
        )(*args)
    torch._dynamo.reset()
    (report,) = reports
    return Path(report.dump)


def forward(mapping, loc):
    """The smallest graph with something to hoist."""
    return translate_loc(mapping, loc) + translate_loc(mapping, loc)


def compile_once(root, fn=forward, args=(MAPPING, LOC), engine="swa_eager"):
    """Compile and run `fn` with dumps below `root`; its result and the reports."""
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        options = {"dump_dir": str(root)}
        result = torch.compile(fn, backend=engine, fullgraph=True, options=options)(*args)
    torch._dynamo.reset()
    return result, reports


def read_captures(report):
    """`captures.json` of the graph of `report`."""
    (folder,) = graph_folders(Path(report.dump))
    return json.loads((folder / "captures.json").read_text())


@pytest.fixture
def dumped(tmp_path):
    """dumped(fn, *args, engine=..., **options) -> folder: see `compile_into`."""
    return lambda fn, *args, **kwargs: compile_into(tmp_path / "dumps", fn, *args, **kwargs)


@pytest.fixture(scope="session")
def model_dump(tmp_path_factory):
    """The dump of four layers, of which number 1 is full attention."""
    root = tmp_path_factory.mktemp("model")
    return compile_into(root, Model(LAYERS, full=(1,)), *arguments(LAYERS))


@pytest.fixture(scope="session")
def mixed_dump(tmp_path_factory):
    """The dump of a forward with one hoisted and three refused values, without modules."""

    def forward(mapping, draft, loc, x, caches):
        for i, (k, v) in enumerate(caches):
            through, ids = mapping, loc
            if i == 1:
                ids = (x[:, 0, 0].sigmoid() * 90).to(torch.int64)
            if i == 2:
                draft.index_fill_(0, loc[:1], 3)
            if i in (0, 2):
                through = draft
            store_kv(k, v, x, x, translate_loc(through, ids))
            x = x + 1
        return x

    x, mapping, loc, *_, caches = arguments(4)
    root = tmp_path_factory.mktemp("mixed")
    return compile_into(root, forward, mapping, mapping.clone(), loc, x, caches)


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


@pytest.fixture
def serving():
    """serving(root) -> get; get(path, host=None) -> (status, text) from a server of `root`."""
    with contextlib.ExitStack() as servers:

        def start(root: Path):
            server = servers.enter_context(serve(root))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            servers.callback(thread.join)
            servers.callback(server.shutdown)

            def get(path, host=None):
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
                connection.putrequest("GET", path, skip_host=True)
                connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
                connection.endheaders()
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

            return get

        yield start


def find_chromium() -> str | None:
    """The browser that the machine has, or the one that the environment names."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium; where there is none, the tests of pages are skipped and say so."""
    path = find_chromium()
    if path is None:
        text = "NO BROWSER: the pages of dumps are NOT tested; install chromium (.ci/run does)"
        warnings.warn(text, stacklevel=1)
        pytest.skip(text)
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Page:
    """A page that is open, and what its console said."""

    def __init__(self, browser, url: str, dark: bool, size: tuple[int, int]) -> None:
        scheme = "dark" if dark else "light"
        self.complaints: list[str] = []
        self.requests: list[str] = []
        viewport = dict(zip(("width", "height"), size, strict=True))
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]")

    def _console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture
def open_page(browser):
    """open_page(folder, fragment, dark, size) -> Page; fails at the end on console errors."""
    opened: list[Page] = []

    def open_one(folder: Path, fragment="", dark=False, size=(1280, 800)) -> Page:
        opened.append(Page(browser, f"{(folder / 'index.html').as_uri()}#{fragment}", dark, size))
        return opened[-1]

    yield open_one
    for page in opened:
        page.context.close()
    assert [line for page in opened for line in page.complaints] == []
