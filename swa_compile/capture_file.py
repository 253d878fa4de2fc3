"""`captures.json` in a graph's dump: what was captured, as of the time that it says.

The record goes on counting at every call, and a replay writes nothing. The file is written when the
graph is compiled, when a set of sizes is recorded for the first time or comes out in another way
than before, at the end of `swa_compile.collect()`, and when the graph goes or the process ends.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path

from swa_compile.captures import Captures
from swa_compile.passes.folder import write_file
from swa_compile.viewer.page import put_captures

CAPTURES = "captures.json"


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
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            text = json.dumps({"time": now, **captures.to_dict()}, indent=2) + "\n"
            write_file(folder / CAPTURES, text)
            put_captures(folder, text)
        except Exception as error:
            warnings.warn(f"{folder / CAPTURES} was not written: {error!r}", stacklevel=2)

    captures.write_with(write)
