"""The page of one graph's dump."""

from __future__ import annotations

import html
from pathlib import Path

from swa_compile.passes.folder import write_file


def write_page(folder: Path) -> None:
    """Write `index.html` into `folder` from what the other files there say."""
    report = (folder / "report.json").read_text(encoding="utf-8")
    write_file(folder / "index.html", f"<!doctype html><pre>{html.escape(report)}</pre>\n")
