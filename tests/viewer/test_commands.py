"""`swa-compile view` and `diff`, and the server behind the first."""

import _thread
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

import swa_compile.cli
from swa_compile.passes.graph_file import read_graph, write_graph

from .conftest import Model, arguments, compile_into


@pytest.fixture
def get(serving, model_dump):
    """get(path, host=None) -> (status, text) from a server of the dump directory."""
    return serving(model_dump.parents[1])


def test_the_root_lists_the_graphs_and_links_to_their_pages(get, model_dump):
    status, text = get("/")
    where = f"{model_dump.parent.name}/graph-000/index.html"
    assert status == 200 and f'href="{where}"' in text and "6 &rarr; 1" in text
    status, page = get(f"/{where}")
    assert status == 200 and 'id="picture"' not in page and '<script id="data"' in page
    assert get(f"/{model_dump.parent.name}")[0] == 200


@pytest.mark.parametrize("end", ["", "/", "/index.html"])
def test_the_links_of_a_process_lead_to_its_graphs(get, model_dump, end):
    """However its list was asked for."""
    status, text = get(f"/{model_dump.parent.name}{end}")
    (link,) = re.findall(r'href="([^"]*)"', text)
    status, page = get(urljoin(f"/{model_dump.parent.name}{end}", link))
    assert status == 200 and '<script id="data"' in page


def test_only_dumps_are_served_and_only_to_this_machines_names(get, model_dump):
    outside = model_dump.parents[1].parent / "secret.txt"
    outside.write_text("secret")
    for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/nothing", "/..%2f..%2fetc/passwd"):
        status, text = get(path)
        assert status == 404 and "secret" not in text
    assert get("/", host="evil.example:80")[0] == 403


@pytest.fixture
def interrupts():
    """Ctrl-C is heard, also by children: a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_view_prints_an_address_that_answers_and_ends_on_interrupt(model_dump, interrupts):
    command = [sys.executable, "-m", "swa_compile", "view", str(model_dump), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("1 graph at http://127.0.0.1:")
            port = int(line.split(":")[2].split("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_browser_that_takes_the_terminal_until_one_leaves_it_is_answered(
    model_dump, monkeypatch, capsys, interrupts
):
    """As w3m does: `webbrowser.open` comes back when the user quits."""
    answers = []

    def browse(address):
        with urlopen(address, timeout=20) as answer:
            answers.append(answer.status)
        _thread.interrupt_main()

    monkeypatch.setattr("webbrowser.open", browse)
    assert swa_compile.cli.main(["view", str(model_dump)]) == 0
    assert answers == [200]


@pytest.mark.parametrize(
    "command", [["view", "."], ["view", "no/such"], ["diff", ".", "."], ["diff", "no/such", "."]]
)
def test_a_folder_without_dumps_is_wrong_usage(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert swa_compile.cli.main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("there is no folder no/such" in error) == ("no/such" in command)


def test_equal_dumps_have_no_difference(model_dump, tmp_path, capsys):
    again = compile_into(tmp_path, Model(4, full=(1,)), *arguments(4))
    assert swa_compile.cli.main(["diff", str(model_dump), str(again)]) == 0
    assert "no difference" in capsys.readouterr().out


def test_what_differs_is_named_and_exits_1(model_dump, tmp_path, capsys):
    other = compile_into(tmp_path, Model(4), *arguments(4))
    assert swa_compile.cli.main(["diff", str(model_dump), str(other)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "graph 0: translations found: 6 -> 8" in out
    assert "graph 0: value gone: mapping[loc] int64[5] used 3x" in out
    assert "graph 0: value new: mapping[loc] int64[5] used 4x" in out
    assert "graph 0: stage functional: swa::translate_loc 3 -> 4" in out
    assert not any("stage hoisted: swa::translate_many" in line for line in out)


def test_versions_are_told_and_are_no_difference(model_dump, tmp_path, capsys):
    other = tmp_path / "graph-000"
    shutil.copytree(model_dump, other)
    data = read_graph(other)
    data["provenance"]["torch"] = "9.9.9"
    write_graph(other, data)
    assert swa_compile.cli.main(["diff", str(model_dump), str(other)]) == 0
    assert "made with torch:" in capsys.readouterr().out
    report = json.loads((other / "report.json").read_text())
    report["refused"] = [{"code": "ESCAPES", "message": "", "node": "x", "source": "m.py:3"}]
    (other / "report.json").write_text(json.dumps(report))
    assert swa_compile.cli.main(["diff", str(model_dump), str(other)]) == 1
    assert "refusal new: ESCAPES at m.py:3" in capsys.readouterr().out


def test_a_line_that_one_dump_does_not_know_is_no_difference(model_dump, tmp_path, capsys):
    """A graph that came out of a compile cache may have none."""
    folders = [tmp_path / name / "graph-000" for name in ("cold", "warm")]
    for folder, source in zip(folders, ("m.py:3", ""), strict=True):
        shutil.copytree(model_dump, folder)
        report = json.loads((folder / "report.json").read_text())
        report["refused"] = [{"code": "ESCAPES", "message": "", "node": "x", "source": source}]
        (folder / "report.json").write_text(json.dumps(report))
    assert swa_compile.cli.main(["diff", *map(str, folders)]) == 0
    assert "no difference" in capsys.readouterr().out
