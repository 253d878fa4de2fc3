"""Dumps that are broken, edited, of another version, or put together by somebody else."""

import json
import os
import re
import shutil

import pytest

import swa_compile.cli
from swa_compile.passes import reading
from swa_compile.viewer.dump import Dump
from swa_compile.viewer.overview import overview
from swa_compile.viewer.page import page, write_page

from .conftest import LAYERS


def edited(dump, tmp_path, file, text):
    """A copy of `dump` in which `file` has another `text`."""
    copy = tmp_path / "edited" / "graph-000"
    shutil.copytree(dump, copy)
    (copy / file).write_bytes(text)
    return copy


DEEP = b"[" * 100_000
NODE = b'{"name":"x","op":"call_function","target":"aten::add","kind":"compute"}'
BROKEN = [
    *(("report.json", text) for text in (b'{"translations_found": 3, "tra', b"[]", b"", DEEP)),
    *(("report.json", text) for text in (b'{"values": [1]}', b'{"cache_copies": NaN}')),
    ("report.json", '{"dump": "é"}'.encode("latin-1")),
    *(("graph.json", text) for text in (b'{"format":1,"stages":[{"na', b"[]", b"", DEEP)),
    *(("graph.json", text) for text in (b'{"format":1}', b'{"format":2,"stages":[],"nodes":[]}')),
    *(
        ("graph.json", b'{"format":1,"stages":[%s],"nodes":[%s]}' % parts)
        for parts in (
            (b'{"name":"functional","file":"x","nodes":[0]}', b""),
            (b'{"name":"functional","file":"x","nodes":[0]}', b'{"name":1}'),
            (b"1", NODE),
            (b'{"name":"functional","nodes":[0]}', NODE),
            (b'{"name":"functional","file":"x","nodes":["a"]}', NODE),
            (b"", NODE.replace(b"}", b',"args":[1]}')),
            (b"", NODE.replace(b"}", b',"shape":4}')),
        )
    ),
    ("graph.json", b'{"format":1,"stages":[],"answers":[3]}'),
    ("graph.json", b'{"format":1,"stages":[],"stacks":[3]}'),
]


@pytest.mark.parametrize(("file", "text"), BROKEN)
def test_a_file_that_cannot_be_read_is_named(file, text, model_dump, tmp_path, capsys):
    """In one line by `diff`, and in its row by `view`, which lists the others as before."""
    broken = edited(model_dump, tmp_path, file, text)
    assert swa_compile.cli.main(["diff", str(model_dump), str(broken)]) == 2
    error = capsys.readouterr().err
    assert f"{file} cannot be read" in error and error.count("\n") == 1
    shutil.copytree(model_dump, broken.parent / "graph-001")
    listed = overview(broken.parent)
    assert f"{file} cannot be read" in listed and "graph-001/index.html" in listed


def test_a_report_that_lacks_later_figures_is_shown_without_them(model_dump, tmp_path):
    report = json.loads((model_dump / "report.json").read_text())
    for key in ("partitions", "rows_fused", "cache_copies", "refused", "from_cache"):
        del report[key]
    for value in report["values"]:
        del value["code"]
    text = json.dumps({**report, "later": 1}).encode()
    old = edited(model_dump, tmp_path, "report.json", text)
    assert "later" not in Dump.read(old).report
    assert page(Dump.read(old)) and "6 &rarr; 1" in overview(old.parent)
    assert swa_compile.cli.main(["diff", str(model_dump), str(old)]) == 0


def test_a_file_that_is_too_large_is_cut_or_named(model_dump, tmp_path, monkeypatch):
    """Whatever its size: no more is read of it than a dump's file may have."""
    monkeypatch.setattr(reading, "MAX_BYTES", 5000)
    report = (model_dump / "report.json").read_bytes()
    large = edited(model_dump, tmp_path, "report.json", report + b" " * 5000)
    with pytest.raises(
        ValueError, match=r"report\.json cannot be read: it has \d+ bytes, and .*5000"
    ):
        Dump.read(large)
    for name in ("report.json", "graph.json"):
        (large / name).write_text("{}" if name == "report.json" else '{"format":1,"stages":[]}')
    (large / "02-lowered.py").write_bytes(b"x = 1\n" * 10**6)
    text = Dump.read(large).texts["02-lowered.py"]
    assert text.startswith("x = 1\n") and len(text) < 5200
    assert "of 6000000 bytes are shown" in text.splitlines()[-1]


def test_what_is_no_file_is_passed_over(model_dump, tmp_path):
    """Folders, pipes (reading one would wait for ever) and links that lead nowhere or in a ring."""
    folder = edited(model_dump, tmp_path, "more.txt", b"here")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "captures.json")
    (folder / "gone.py").symlink_to("nowhere")
    (folder / "ring.py").symlink_to("ring.py")
    before, now = Dump.read(model_dump), Dump.read(folder)
    assert now.texts == {**before.texts, "more.txt": "here"}
    assert (now.captures, now.captures_error) == ({}, "")


def test_links_out_of_a_dump_are_not_followed(model_dump, tmp_path, serving):
    """A dump of somebody else's must not put a file of the reader's into a page."""
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    folder = edited(model_dump, tmp_path, "own.py", b"shown")
    (folder / "linked.txt").symlink_to("own.py")
    (folder / "secret.txt").symlink_to(secret)
    dump = Dump.read(folder)
    assert dump.texts["linked.txt"] == "shown"
    assert "hidden" not in dump.texts["secret.txt"] and str(secret) in dump.texts["secret.txt"]
    get = serving(folder.parent)
    assert get("/graph-000/linked.txt") == (200, "shown")
    assert get("/graph-000/secret.txt")[0] == 404
    (folder / "report.json").unlink()
    (folder / "report.json").symlink_to(model_dump / "report.json")
    with pytest.raises(ValueError, match=r"report\.json cannot be read: it is a link"):
        Dump.read(folder)


def test_a_folder_that_is_a_link_out_of_the_root_is_listed_without_a_link(model_dump, tmp_path):
    """The server does not go there."""
    (tmp_path / "graph-000").symlink_to(model_dump)
    listed = overview(tmp_path)
    assert f"a link to {model_dump}" in listed and "href" not in listed


def test_names_that_are_no_text_are_listed_and_led_to(model_dump, tmp_path, serving):
    root = tmp_path / os.fsdecode(b"d\xfcmp")
    shutil.copytree(model_dump, root / os.fsdecode(b"graph-\xff00"))
    (root / os.fsdecode(b"graph-\xff00") / os.fsdecode(b"\xfe.txt")).write_text("kept")
    get = serving(root)
    status, text = get("/")
    (link,) = re.findall(r'href="([^"]*)"', text)
    assert status == 200 and link == "graph-%FF00/index.html"
    status, text = get(f"/{link}")
    assert status == 200 and '<script id="data"' in text
    assert get("/%00")[0] == 404


def test_a_graph_that_cannot_be_told_is_an_answer_of_the_server(
    model_dump, tmp_path, serving, monkeypatch
):
    """Whatever is wrong with it, and the server goes on."""
    folder = edited(model_dump, tmp_path, "graph.json", b'{"format":1,"stages":[{"name":1}]}')
    shutil.copytree(model_dump, folder.parent / "graph-001")
    get = serving(folder.parent)
    status, text = get("/graph-000")
    assert status == 500 and "graph.json cannot be read" in text
    assert get("/graph-001")[0] == 200
    monkeypatch.setattr("swa_compile.viewer.serve.page", {}.__getitem__)  # a fault of ours
    assert get("/graph-001")[0] == 500
    assert get("/")[0] == 200


UNREADABLE = [
    *(b'{"mode": "au', b"%%%", b"", b"[]", b"3", b'{"recorded": [1]}', b"\xff\xfe\0"),
    b'{"format": 2, "buckets": []}',
]


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
