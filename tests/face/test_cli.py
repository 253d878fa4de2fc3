"""The command line: exit codes, one-line errors, and the demo's claims."""

import json
import os
import re
import subprocess
import sys

import pytest

import swa_compile.cli


def run(*args, cwd=None, **environment):
    """The command in a process of its own, as a shell would start it."""
    done = subprocess.run(
        [sys.executable, "-m", "swa_compile", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


def test_no_arguments_print_help_and_exit_2(capsys):
    assert swa_compile.cli.main([]) == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["demo", "--window", "1"], "--window is at least 2; got 1"),
        (["demo", "--layers", "0"], "--layers is at least 1; got 0"),
        (["demo", "--text", "no/such/file"], "cannot read no/such/file"),
        (["demo", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["bench", "--runs", "0"], "--runs is at least 1; got 0"),
        (["demo", "--dump", __file__], "test_cli.py is a file"),
        (["bench", "--resume"], "the file that --json names"),
        (["bench", "--rows", "stores"], "--rows picks rows of --targets"),
        (["bench", "--jobs", "0"], "--jobs is at least 1; got 0"),
        (["bench", "--budget", "-1"], "above 0; got -1"),
        (["explain", "nothing"], "not of the form MODULE:FACTORY"),
        (["explain", "no_such_module:f"], "there is no module 'no_such_module'"),
        (["explain", "json:no_such_factory"], "has no factory 'no_such_factory'"),
    ],
)
def test_wrong_usage_is_one_line_and_exits_2(argv, words, capsys):
    assert swa_compile.cli.main(argv) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_plots_are_refused_ahead_of_the_measuring_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(swa_compile.cli.bench, "_measure", None)
    assert swa_compile.cli.main(["bench", "--plot", "plots"]) == 2
    assert "plots want matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nonsense"], ["demo", "--page-size", "3"]])
def test_what_argparse_refuses_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        swa_compile.cli.main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "argv", [["--debug", "explain", "nothing"], ["explain", "nothing", "--debug"]]
)
def test_debug_shows_the_traceback_wherever_it_stands(argv):
    with pytest.raises(Exception, match="MODULE:FACTORY"):
        swa_compile.cli.main(argv)


FACTORY = """
import torch
from swa_compile.ops import translate_loc

def forward(mapping, loc):
    return translate_loc(mapping, loc) + translate_loc(mapping, loc)

def build():
    return forward, (torch.tensor([0, 3, 2, 1, -1]), torch.tensor([2, 1]))

def wrong():
    return 3

def lazy(mapping, loc, x):
    import beside  # only now: the folder has to be on the path while the forward runs, too
    return translate_loc(mapping, loc) + translate_loc(mapping, x.long() + beside.ZERO)

def build_lazily():
    import beside
    return lazy, (torch.tensor([0, 3, 2, 1, -1]), torch.tensor([2, beside.ZERO]), torch.ones(2))
"""


@pytest.mark.inductor
def test_explain_finds_a_factory_in_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(FACTORY)
    code, out, _ = run("explain", "mine:build", "--json", cwd=tmp_path)
    assert code == 0
    (graph,) = json.loads(out)["graphs"]
    assert (graph["translations_found"], graph["translation_nodes"]) == (2, 1)
    code, _, error = run("explain", "mine:wrong", cwd=tmp_path)
    assert code == 2 and "returned int" in error


@pytest.mark.inductor
def test_explain_strict_shows_the_story_and_exits_1(tmp_path):
    """Of a factory whose imports come late; --strict fails where the option would raise."""
    (tmp_path / "mine.py").write_text(FACTORY)
    (tmp_path / "beside.py").write_text("ZERO = 0\n")
    # A report from the compile cache names the file as it was called when it was made.
    own = str(tmp_path / "cache")
    arguments = ("explain", "mine:build_lazily", "--strict")
    code, out, error = run(*arguments, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=own)
    assert (code, error.count("\n")) == (1, 1), error
    assert "1 translation stays in the layer code (LOC_FROM_ACTIVATIONS)" in error
    assert re.search(r"1 call in the layers +mapping\[loc\]", out)
    assert re.search(r"> +\d+ \|     return translate_loc\(mapping, loc\) \+", out)
    assert "do:  Compute the ids from index inputs" in out


def test_a_module_that_imports_something_missing_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import nee\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with pytest.raises(ModuleNotFoundError, match="nee"):
        swa_compile.cli.main(["--debug", "explain", "needy:build"])
    assert sys.path == path


@pytest.mark.inductor
def test_demo_shows_one_node_equal_tokens_and_equal_rows(tmp_path):
    """Shorter than `make demo`, past the window, with pages; the shipped text."""
    code, out, error = run(
        *("demo", "--layers", 4, "--window", 24, "--page-size", 16, "--max-new-tokens", 40),
        *("--device", "cpu", "--dump", tmp_path / "dumps"),
    )
    assert code == 0, error
    assert "4 -> 1 node" in out
    assert re.search(r"tokens +equal", out)
    assert re.search(r"cache rows +\d+ compared, equal", out)
    (folder,) = (tmp_path / "dumps").glob("pid-*/graph-000")
    assert (folder / "03-inductor.py").read_text().count("def call(") == 1
    assert json.loads((folder / "report.json").read_text())["stores_lowered"] == 4


@pytest.mark.inductor
@pytest.mark.parametrize("size", [80, 170, 232])
def test_demo_says_how_long_a_text_of_the_users_has_to_be(size, tmp_path):
    """The third of its requests is cut from the text last, and ends at byte 233."""
    text = tmp_path / "text"
    text.write_text("a" * size)
    code, _, error = run("demo", "--text", text, "--window", 64, "--device", "cpu")
    assert code == 2 and f"{size} bytes; window 64 wants 233" in error


@pytest.mark.inductor
def test_doctor_tries_what_has_to_work():
    code, out, error = run("doctor")
    assert code == 0, error
    assert "works  swa on cpu" in out and "fails" not in out
    assert "works  attention on cpu" in out
    assert all(kernel in out for kernel in ("triton", "flashinfer", "varlen", "sdpa", "reference"))
