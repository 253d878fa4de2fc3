"""Ranks as processes: started, bounded in time, and gone when the test is over."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
}


class RanksFailed(AssertionError):
    """A rank ended otherwise than the test expects; the message holds what each rank printed."""


def launch(
    program: str,
    ranks: int,
    folder: Path,
    *,
    timeout: float = 180.0,
    group_timeout: float = 60.0,
    device: str = "cpu",
    exits: dict[int, int] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run `main(rank, **arguments)` of `programs/<program>.py` on `ranks` ranks.

    Args:
        folder: empty; the group's store and what the ranks print and return lie there.
        timeout: seconds after which every rank that still runs is killed, and the test fails.
        group_timeout: seconds that a collective waits for the others.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank).
        exits: the exit codes of ranks that are to die; the others have to end with 0.

    Returns:
        What `main` returned on each rank, None for a rank that died.

    Raises:
        RanksFailed: a rank failed, died otherwise than expected, or ran out of time.
    """
    # A forked rank has torch already. CUDA cannot be used in one if its parent so much as looked.
    method = "forkserver" if device == "cpu" else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["programs.warm"])
    shared = {
        "program": program,
        "folder": str(folder),
        "ranks": ranks,
        "group_timeout": group_timeout,
        "device": device,
        "arguments": arguments,
    }
    processes = []
    with _environment():
        for rank in range(ranks):
            process = context.Process(
                target=runpy.run_path,
                args=(str(HERE / "programs" / "__main__.py"),),
                kwargs={"init_globals": {"RANK": rank, "SHARED": shared}, "run_name": "__main__"},
                daemon=True,
            )
            process.start()
            processes.append(process)
    wanted = [(exits or {}).get(rank, 0) for rank in range(ranks)]
    late = _wait(processes, wanted, time.monotonic() + timeout)
    codes = [process.exitcode for process in processes]
    if late or codes != wanted:
        printed = [(folder / f"rank-{rank}.txt") for rank in range(ranks)]
        texts = [file.read_text()[-6000:] if file.exists() else "" for file in printed]
        said = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))
        stopped = f"; ranks {late} were stopped, later than they may run" if late else ""
        raise RanksFailed(f"exit codes {codes}, not {wanted}{stopped}\n{said}")
    results = []
    for rank, code in enumerate(codes):
        file = folder / f"rank-{rank}.pickle"
        results.append(None if code else pickle.loads(file.read_bytes()))
    return results


def launch_once(tmp_path_factory: Any, program: str, ranks: int, **arguments: Any) -> list[Any]:
    """`launch`, once for all tests of a module, also where pytest-xdist splits them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{program}-{ranks}"
    results = folder.with_suffix(".pickle")
    with FileLock(folder.with_suffix(".lock")):
        if not results.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            results.write_bytes(pickle.dumps(launch(program, ranks, folder, **arguments)))
        return pickle.loads(results.read_bytes())


def _wait(processes: list[Any], wanted: list[int], deadline: float) -> list[int]:
    """Until all have ended; the ranks that had to be killed.

    Once a rank has failed, the others only have a moment: they may wait for it in a collective.
    """
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        ended = zip(processes, wanted, strict=True)
        if any(process.exitcode not in (None, code) for process, code in ended):
            deadline = min(deadline, time.monotonic() + 3)
        time.sleep(0.02)
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        os.kill(processes[rank].pid, signal.SIGABRT)  # faulthandler says where it was
        processes[rank].join(1)
        processes[rank].kill()
    for process in processes:
        process.join()
    return late


@contextmanager
def _environment():
    """What the fork server, and through it every rank, finds in its environment."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
