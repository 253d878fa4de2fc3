"""When `captures.json` is written, and what is left where that fails."""

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

import swa_compile
from swa_compile import capture_file
from swa_compile.captures import Captures, Recorded
from swa_compile.capturing import Capturing
from swa_compile.passes import folder as folder_module
from swa_compile.viewer.dump import Dump

from .conftest import ATTENTION, read_captures


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


@pytest.mark.parametrize(
    "read",
    [
        lambda captures: captures.to_dict(),
        lambda captures: swa_compile.GraphReport(captures=captures).to_dict(),
    ],
    ids=["record", "report"],
)
def test_a_record_that_another_thread_adds_to_can_be_read(read):
    """A dict that grows while it is walked through would raise."""
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
            read(captures)
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
