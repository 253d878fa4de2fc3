"""The fixture `swa_report`, in test files as a user would write them."""

import subprocess
import sys

import pytest

HEAD = """
import torch
from swa_compile.ops import translate_loc

def hoistable(mapping, loc):
    return translate_loc(mapping, loc) + translate_loc(mapping, loc)

def refused(mapping, loc):
    ids = (loc.float().exp() * 0 + 1).to(torch.int64)
    mapping.index_fill_(0, loc, 0)
    return translate_loc(mapping, loc) + translate_loc(mapping, ids)

def plain(mapping, loc):
    return mapping + 1

def run(fn):
    return torch.compile(fn, backend="swa_eager")(torch.arange(10), torch.tensor([1, 2]))
"""


def outcome(tmp_path, body):
    (tmp_path / "test_mine.py").write_text(f"{HEAD}\n{body}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return done.returncode, done.stdout


def test_hoisted_models_pass_also_when_compiled_twice(tmp_path):
    code, out = outcome(
        tmp_path,
        "def test_a(swa_report):\n    run(hoistable)\n    swa_report.assert_hoisted()\n"
        "def test_b(swa_report):\n    run(hoistable)\n    swa_report.assert_hoisted(max_nodes=1)\n",
    )
    assert code == 0, out


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("run(refused); swa_report.assert_hoisted()", ["2 translation nodes, wanted at most 1"]),
        ("run(refused); swa_report.assert_hoisted()", ["refused MAPPING_WRITTEN at", "do:"]),
        ("run(plain); swa_report.assert_hoisted()", ["no graph has a translation"]),
        ("swa_report.assert_hoisted()", ["no graph was compiled here"]),
    ],
)
def test_failures_say_why(body, words, tmp_path):
    code, out = outcome(tmp_path, f"def test_a(swa_report):\n    {body}\n")
    assert code == 1
    assert all(word in out for word in words), out
    assert "Traceback" not in out and "pytest_plugin.py" not in out
