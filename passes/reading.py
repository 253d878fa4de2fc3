"""Files of a dump, read back: bounded, and none that lies elsewhere.

A dump may come from another machine or be edited, and what is read of it is shown in a page,
perhaps to others. So a link that leads out of its folder is not followed, and no more is read than
is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from .folder import MAX_BYTES, cut_short


def read_text(path: Path) -> str:
    """The text of `path`, with what is no UTF-8 replaced, and cut like what is written.

    Raises:
        OSError: where it cannot be read.
        ValueError: where it is a link out of its folder.
    """
    data, size = _read(path)
    if size > len(data):
        return cut_short(data, size)
    return data.decode("utf-8", "replace")


def read_json(path: Path) -> Any:
    """What the JSON file `path` says.

    Raises:
        OSError, ValueError: as `read_text` does, and where it is no JSON or exceeds the bound.
    """
    data, size = _read(path)
    if size > len(data):
        raise ValueError(f"it has {size} bytes, and a dump's file has at most {MAX_BYTES}")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def short_json(data: Any) -> str:
    """The beginning of `data`, for a message."""
    text = json.dumps(data)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _read(path: Path) -> tuple[bytes, int]:
    """The first `MAX_BYTES` of `path`, and how many it has."""
    if path.resolve().parent != path.parent.resolve():
        raise ValueError(f"it is a link to {path.resolve()}, out of the dump")
    with path.open("rb") as file:
        # Of the file that is open: meanwhile another one may have taken its name.
        return file.read(MAX_BYTES), os.fstat(file.fileno()).st_size


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
