"""The folders that dumps lie in: one per graph, whole or not visible, and bounded.

    <dump_dir>/pid-<process>[-rank-<rank>]/graph-<nnn>/

A graph's folder is filled under a hidden name and renamed when its files are complete, so nobody
finds half a folder; each file is written aside and renamed, so nobody finds half a file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

ENVIRONMENT_VARIABLE = "SWA_COMPILE_DUMP"

# Bounds of a process's dumps. A model compiles to a handful of graphs; a hundred means that
# something recompiles for ever, and the first hundred say why as well as all would.
MAX_GRAPHS = 100
MAX_BYTES = 8 * 2**20  # of one file

LIMIT_NOTE = "no-more-graphs.txt"


def dump_root(dump_dir: str | None) -> Path | None:
    """Where dumps go: `dump_dir`, else what the environment variable says, else nowhere."""
    chosen = dump_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else None


def new_folder(root: Path) -> Path | None:
    """A hidden folder for the next graph of this process below `root`; None at `MAX_GRAPHS`.

    Raises:
        OSError: where it cannot be made.
    """
    parent = root / _process_name()
    parent.mkdir(parents=True, exist_ok=True)
    if sum(1 for _ in parent.glob("graph-*")) >= MAX_GRAPHS:
        text = f"this process dumped {MAX_GRAPHS} graphs; later ones were compiled without a dump"
        if not (parent / LIMIT_NOTE).exists():
            write_file(parent / LIMIT_NOTE, text + "\n")
        warnings.warn(f"no dump in {parent}: {text}", stacklevel=2)
        return None
    return Path(tempfile.mkdtemp(dir=parent, prefix=".graph-", suffix=".part"))


def publish_folder(hidden: Path, finish: Callable[[Path], None]) -> Path:
    """Give `hidden` the next free name `graph-<nnn>` and return that.

    Args:
        hidden: from `new_folder`, filled.
        finish: called with the coming name ahead of the renaming, to write what holds it.

    Raises:
        OSError: where it cannot be renamed; `hidden` is left as it is.
    """
    hidden.chmod(0o755)  # mkdtemp makes folders that only their owner reads
    number = 0
    while True:
        folder = hidden.parent / f"graph-{number:03d}"
        if not folder.exists():
            finish(folder)
            try:
                hidden.rename(folder)
            except OSError:
                if not folder.exists():  # else another thread of this process was faster
                    raise
            else:
                return folder
        number += 1


def discard_folder(hidden: Path) -> None:
    """Remove a folder that will not be published."""
    shutil.rmtree(hidden, ignore_errors=True)


def write_file(path: Path, text: str) -> bool:
    """Write `text` whole or not at all; a failure is a warning that names the file.

    Text of more than `MAX_BYTES` is cut behind a line, and a last line says so.

    Returns:
        True where the file was written.
    """
    data = bounded(text).encode("utf-8", "backslashreplace")
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(part, 0o644)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        warnings.warn(f"dump file {path} was not written: {error}", stacklevel=2)
        return False
    return True


def bounded(text: str) -> str:
    """`text`, or as many whole lines of it as `MAX_BYTES` takes and one that says what is cut."""
    if len(text) <= MAX_BYTES // 4:  # no encoding makes more than four bytes of a character
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_BYTES:
        return text
    return cut_short(data, len(data))


def cut_short(data: bytes, size: int) -> str:
    """The whole lines in the first `MAX_BYTES` of `data`, and one that says what is cut.

    Args:
        data: the beginning of a text.
        size: bytes of all of it.
    """
    kept = data[:MAX_BYTES]
    kept = kept[: kept.rfind(b"\n") + 1]
    note = f"# cut here: {len(kept)} of {size} bytes are shown (the bound is {MAX_BYTES})\n"
    return kept.decode("utf-8", "replace") + note


def _process_name() -> str:
    rank = os.environ.get("RANK")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = str(torch.distributed.get_rank())
    return f"pid-{os.getpid()}" + (f"-rank-{rank}" if rank and rank.isdigit() else "")
