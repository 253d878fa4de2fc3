"""The page that lists the graphs below a dump directory."""

from __future__ import annotations

import html
import os
from pathlib import Path
from urllib.parse import quote

from swa_compile.passes.folder import LIMIT_NOTE
from swa_compile.viewer.dump import Dump, graph_folders

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 32px auto; padding: 0 24px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid #8884; }
td.n { font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; } td[colspan] { overflow-wrap: anywhere; }
.bad { color: #c03a06; font-weight: 600; } .faint { opacity: .75; }
@media (prefers-color-scheme: dark) { .bad { color: #ff9a66; } }
"""
_HEADS = ("graph", "translations", "refused", "left", "stores lowered", "code", "made")


def overview(root: Path, address: str = "") -> str:
    """A table of the graphs below `root`, each with a link to its page.

    Args:
        root: a folder of dumps.
        address: what links to what lies in `root` begin with.
    """
    rows = [_row(root, address, folder) for folder in graph_folders(root)]
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    places = (LIMIT_NOTE, f"pid-*/{LIMIT_NOTE}")
    cut = [note.parent.name for place in places for note in sorted(root.glob(place))]
    notes = "".join(
        f'<p class="bad">{html.escape(name)} compiled more graphs than are dumped.</p>'
        for name in cut
    )
    body = (
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        if rows
        else "<p>No graph was dumped here.</p>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{html.escape(root.name)} - swa_compile</title><style>{_STYLE}</style></head>"
        f"<body><h1>Dumps</h1><p class=faint>{html.escape(str(root))}</p>{notes}{body}"
        "</body></html>"
    )


def _row(root: Path, address: str, folder: Path) -> str:
    where = folder.relative_to(root).as_posix()
    target = os.fsencode(f"{address}{where}/index.html")  # a name of a file may be no text
    link = f'<a href="{quote(target)}">{html.escape(where)}</a>'
    try:
        if root.resolve() not in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(f"a link to {folder.resolve()}, which has to be viewed by itself")
        dump = Dump.read(folder)
    except (OSError, ValueError) as error:
        why = html.escape(str(error))
        return f"<tr><td>{html.escape(where)}</td><td colspan=6 class=bad>{why}</td></tr>"
    report = dump.report
    made = html.escape(dump.graph.get("provenance", {}).get("time", ""))
    if not report:
        return f"<tr><td>{link}</td><td colspan=5 class=bad>a pass raised</td><td>{made}</td></tr>"
    code = "from the cache" if report["from_cache"] else "compiled" if dump.code else "none"
    cells = [
        f"{report['translations_found']} &rarr; {report['translation_nodes']}",
        _number(len(report["refused"])),
        _number(report["translations_left"]),
        f"{report['stores_lowered']} of {report['stores_found']}",
        code,
        made,
    ]
    return f"<tr><td>{link}</td>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>"


def _number(n: int) -> str:
    return f'<span class="bad">{n}</span>' if n else "0"
