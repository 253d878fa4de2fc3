"""`captures.json` in a graph's dump: what was captured, as of the time that it says.

The record goes on counting at every call, and a replay writes nothing. The file is written when the
graph is compiled, when a set of sizes is recorded for the first time or comes out in another way
than before, at the end of `swa_compile.collect()`, and when the graph goes or the process ends.

Each size that is met may be recorded, and the file is written anew for each, so it lists the first
`SIZES` of them and says how many there are beyond.
"""

from __future__ import annotations

import json
import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from swa_compile.captures import Captures
from swa_compile.passes.folder import write_file
from swa_compile.viewer.page import put_captures
from swa_compile.viewer.records import CAPTURES_FORMAT

CAPTURES = "captures.json"
SIZES = 500


def copy_to(folder: Path, captures: Captures) -> None:
    """Keep a copy of `captures` in the dump `folder`, and in its page, from now on.

    A failure to write is a warning. A folder that is gone stays gone, and a forked process leaves
    the file to its parent.
    """
    process = os.getpid()

    def write() -> None:
        if os.getpid() != process or not folder.is_dir():
            return
        try:
            if not os.access(folder, os.W_OK):  # said in the same words every time: shown once
                raise PermissionError("the folder cannot be written to")
            data = _file(captures)
            if write_file(folder / CAPTURES, _text(data)):
                put_captures(folder, data)
        except Exception as error:
            warnings.warn(f"{folder / CAPTURES} was not written: {error!r}", stacklevel=2)

    captures.write_with(write)


def _file(captures: Captures) -> dict[str, Any]:
    data = captures.to_dict()
    further = list(data["recorded"])[SIZES:]
    for size in further:
        del data["recorded"][size]
    data["memory"] = {s: n for s, n in data["memory"].items() if s in data["recorded"]}
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"format": CAPTURES_FORMAT, "time": now, **data, "further_sizes": len(further)}


def _text(data: dict[str, Any]) -> str:
    """JSON with a line for each item of each list and of each dict, and no further ones."""
    entries = []
    for key, value in data.items():
        if isinstance(value, dict):
            items = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            text = "{\n" + ",\n".join(items) + "\n  }" if items else "{}"
        elif isinstance(value, list):
            items = [f"    {json.dumps(item)}" for item in value]
            text = "[\n" + ",\n".join(items) + "\n  ]" if items else "[]"
        else:
            text = json.dumps(value)
        entries.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"
