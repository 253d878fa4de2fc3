"""The stages in other people's tools, each run for real in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, sys, warnings
if "without-depyf" in sys.argv:
    sys.modules["depyf"] = None
import torch, swa_compile
from swa_compile.ops import translate_loc

def forward(mapping, loc):
    return translate_loc(mapping, loc) + translate_loc(mapping, loc)

inside = contextlib.nullcontext()
if "depyf" in sys.argv:
    import depyf
    inside = depyf.prepare_debug("depyf")
with inside, torch.no_grad():
    if "broken-depyf" in sys.argv:
        real = torch._dynamo.utils.lazy_format_graph_code
        def broken(name, *args, **kwargs):
            if name.startswith("swa "):
                raise RuntimeError("depyf is broken")
            return real(name, *args, **kwargs)
        torch._dynamo.utils.lazy_format_graph_code = broken
    compiled = torch.compile(forward, backend="swa_eager")
    assert compiled(torch.arange(10), torch.tensor([1, 2])).tolist() == [2, 4]
"""
STAGES = ("captured", "functional", "hoisted", "lowered")


def run(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """(folder, stderr) of one compilation that depyf, TORCH_TRACE and TORCH_LOGS all watch."""
    folder = tmp_path_factory.mktemp("watched")
    trace = str(folder / "trace")
    done = run(folder, "depyf", TORCH_TRACE=trace, TORCH_LOGS="+swa_compile")
    return folder, done.stderr


def test_depyf_writes_a_file_for_each_stage(watched):
    for stage in STAGES:
        (file,) = (watched[0] / "depyf").glob(f"__compiled_fn_*.swa_{stage}.*.py")
        calls = 2 if stage in ("captured", "functional") else 0
        assert file.read_text().count("= torch.ops.swa.translate_loc.default(") == calls


def test_tlparse_shows_each_stage_and_the_report(watched, tmp_path):
    beside = os.path.dirname(sys.executable)
    program = shutil.which("tlparse", path=beside) or shutil.which("tlparse")
    assert program, "tlparse is not installed: pip install -e '.[test]'"
    (log,) = (watched[0] / "trace").glob("*.log")
    command = [program, str(log), "-o", str(tmp_path / "out"), "--no-browser"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    index = (tmp_path / "out" / "index.html").read_text()
    for stage in STAGES:
        (file,) = (tmp_path / "out").glob(f"*/swa_{stage}_*.txt")
        calls = 2 if stage in ("captured", "functional") else 0
        assert file.read_text().count("= torch.ops.swa.translate_loc.default(") == calls
        assert file.name in index
    (report,) = (tmp_path / "out").glob("*/swa_report_*.json")
    assert "translations_found" in report.read_text()


def test_torch_logs_turns_the_packages_log_on(watched):
    log = watched[1]
    assert [log.count(f"stage {name}\n") for name in STAGES] == [1, 1, 1, 1]
    assert log.count("2 translations -> 1 node") == 1


def test_a_depyf_that_fails_is_a_warning(tmp_path):
    done = run(tmp_path, "depyf", "broken-depyf")
    assert "depyf did not take stage 'hoisted'" in done.stderr
    assert "depyf is broken" in done.stderr


def test_without_depyf_dumps_are_written_and_without_plus_the_log_has_the_report_alone(tmp_path):
    dumps = str(tmp_path / "dumps")
    log = run(tmp_path, "without-depyf", SWA_COMPILE_DUMP=dumps, TORCH_LOGS="swa_compile").stderr
    assert len(list((tmp_path / "dumps").glob("pid-*/graph-000/index.html"))) == 1
    assert "depyf" not in log
    assert log.count("2 translations -> 1 node") == 1 and "stage hoisted" not in log


def test_the_logger_is_registered_with_torch():
    from torch._logging import _internal

    import swa_compile  # noqa: F401

    assert _internal.log_registry.log_alias_to_log_qnames["swa_compile"] == ["swa_compile"]
