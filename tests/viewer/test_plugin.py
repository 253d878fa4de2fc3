"""The fixture `swa_report`, in test files as a user would write them."""

import subprocess
import sys

HEAD = """
import pytest
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


def test_hoisted_models_pass_and_failures_say_why(tmp_path):
    code, out = outcome(
        tmp_path,
        """
def test_hoisted(swa_report):
    run(hoistable)
    swa_report.assert_hoisted()

def test_compiled_by_an_earlier_test(swa_report):
    run(hoistable)
    swa_report.assert_hoisted(max_nodes=1)

def test_refused(swa_report):
    run(refused)
    swa_report.assert_hoisted(max_nodes=2)
    swa_report.assert_hoisted()

def test_plain(swa_report):
    run(plain)
    swa_report.assert_hoisted()

def test_nothing(swa_report):
    swa_report.assert_hoisted()

def test_expected_to_fail(swa_report):
    run(refused)
    with pytest.raises(AssertionError, match="2 translation nodes, wanted at most 1"):
        swa_report.assert_hoisted()
""",
    )
    assert code == 1 and "3 failed, 3 passed" in out, out
    for words in (
        "graph 0: 2 translation nodes, wanted at most 1",
        "refused MAPPING_WRITTEN at",
        "do:  Edit the mapping",
        "no graph has a translation",
        "no graph was compiled here",
    ):
        assert words in out, out
    assert "Traceback" not in out and "pytest_plugin.py" not in out
