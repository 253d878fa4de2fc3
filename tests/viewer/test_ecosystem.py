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
if "broken-depyf" in sys.argv:
    def broken(*args, **kwargs):
        raise RuntimeError("depyf is broken")
    import depyf.explain.utils
    depyf.explain.utils.write_code_to_file_template = broken
    torch._dynamo.utils.lazy_format_graph_code = broken
with inside, torch.no_grad():
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


def test_depyf_writes_a_file_for_each_stage(tmp_path):
    run(tmp_path, "depyf")
    for stage in STAGES:
        (file,) = (tmp_path / "depyf").glob(f"__compiled_fn_*.swa_{stage}.*.py")
        calls = 2 if stage in ("captured", "functional") else 0
        assert file.read_text().count("torch.ops.swa.translate_loc.default(") == calls


def test_a_depyf_that_fails_is_a_warning(tmp_path):
    done = run(tmp_path, "depyf", "broken-depyf")
    assert "depyf did not take stage 'hoisted': depyf is broken" in done.stderr


def test_everything_works_without_depyf(tmp_path):
    done = run(tmp_path, "without-depyf", SWA_COMPILE_DUMP=str(tmp_path / "dumps"))
    assert len(list((tmp_path / "dumps").glob("pid-*/graph-000/index.html"))) == 1
    assert "depyf" not in done.stderr


def test_tlparse_shows_each_stage_and_the_report(tmp_path):
    program = shutil.which("tlparse", path=Path(sys.executable).parent) or shutil.which("tlparse")
    assert program, "tlparse is not installed: pip install -e '.[test]'"
    run(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (log,) = (tmp_path / "trace").glob("*.log")
    command = [program, str(log), "-o", str(tmp_path / "out"), "--no-browser"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    index = (tmp_path / "out" / "index.html").read_text()
    for stage in STAGES:
        (file,) = (tmp_path / "out").glob(f"*/swa_{stage}_*.txt")
        assert "torch.ops.swa." in file.read_text() or stage == "lowered"
        assert file.name in index
    (report,) = (tmp_path / "out").glob("*/swa_report_*.json")
    assert "translations_found" in report.read_text()


@pytest.mark.parametrize(
    ("setting", "stages", "summary"), [("+swa_compile", 4, 1), ("swa_compile", 0, 1), ("", 0, 0)]
)
def test_torch_logs_turns_the_packages_log_on(setting, stages, summary, tmp_path):
    environment = {"TORCH_LOGS": setting} if setting else {}
    log = run(tmp_path, **environment).stderr
    assert sum(f"stage {name}\n" in log for name in STAGES) == stages
    assert log.count("2 translations -> 1 node") == summary


def test_the_logger_is_registered_with_torch():
    from torch._logging import _internal

    import swa_compile  # noqa: F401

    assert _internal.log_registry.log_alias_to_log_qnames["swa_compile"] == ["swa_compile"]
