"""Warm starts: what is in the key of compiled code, and what is not."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, torch, swa_compile
from swa_compile.ops import store_kv, translate_loc

caches = [(torch.zeros(24, 2, 4), torch.zeros(24, 2, 4)) for _ in range(2)]
mapping = torch.cat([torch.arange(96) % 24, torch.tensor([-1])])

def forward(mapping, loc, k):
    for k_cache, v_cache in caches:
        store_kv(k_cache, v_cache, k, k, translate_loc(mapping, loc))

with torch.no_grad(), swa_compile.collect() as reports:
    call = torch.compile(forward, backend="swa", options=json.loads(sys.argv[1]))
    call(mapping, torch.tensor([90, 41]), torch.ones(2, 2, 4))
written = [i for k, v in caches for i in (k + v).flatten(1).any(1).nonzero().flatten().tolist()]
print(json.dumps([[report.to_dict() for report in reports], sorted(set(written))]))
"""


def run(program, folder, **options):
    """The report of a process that compiles with `options` and caches in `folder`."""
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(options)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (report,), written = json.loads(done.stdout.splitlines()[-1])
    assert written == [17, 18]
    return report


@pytest.mark.slow
@pytest.mark.inductor
def test_a_moved_cache_folder_hits_and_another_option_misses(tmp_path):
    """Row B37: a cache that is copied to another machine is worth its bytes, and an option that
    changes code never gets the code of another."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    first, second = tmp_path / "first", tmp_path / "second"
    cold = run(program, first)
    first.rename(second)
    moved = run(program, second)
    opaque = run(program, second, lower_stores=False)

    assert [report["from_cache"] for report in (cold, moved, opaque)] == [False, True, False]
    assert {**cold, "from_cache": True} == moved
    assert (cold["stores_lowered"], opaque["stores_lowered"]) == (2, 0)


@pytest.mark.slow
@pytest.mark.inductor
def test_other_split_ops_miss_the_cache(tmp_path):
    """Row B36: code that was cut elsewhere is never served on a warm start."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = {"cudagraphs": "inductor"}
    cold = run(program, tmp_path / "cache", **options)
    other = run(program, tmp_path / "cache", **options, split_ops=["swa::store_kv"])
    same = run(program, tmp_path / "cache", **options, split_ops=["swa::store_kv"])
    assert [report["from_cache"] for report in (cold, other, same)] == [False, False, True]
