"""The page of one graph's dump: one file that needs nothing else, and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

from swa_compile.passes.folder import MAX_BYTES, write_file
from swa_compile.viewer.advice import ADVICE
from swa_compile.viewer.dump import PAGE, Dump
from swa_compile.viewer.story import tell

# In this order: each file uses what the ones ahead of it define, and the last one starts.
_SCRIPTS = (
    *("dom.js", "data.js", "lines.js", "captures.js", "details.js", "chips.js", "middle.js"),
    *("edges.js", "minimap.js", "bands.js", "lanes.js", "tabs.js", "theme.js"),
    *("address.js", "keys.js", "main.js"),
)
_STYLES = ("colours.css", "page.css", "narrow.css")


# The element that holds what was captured. It stands ahead of all that a dump's texts go into.
_CAPTURES = '<script id="captures" type="application/json">'


def write_page(folder: Path) -> None:
    """Write `index.html` into `folder` from what the other files there say.

    Raises:
        ValueError: where `folder` holds no dump.
    """
    write_file(folder / PAGE, page(Dump.read(folder)))


def put_captures(folder: Path, captures: dict[str, Any]) -> None:
    """Put `captures`, the `captures.json` of today, into the page in `folder`, if there is one.

    The rest of the page stays as it is: it was made of the graph, which does not change.
    """
    path = folder / PAGE
    if path.exists():
        head, start, rest = path.read_text(encoding="utf-8").partition(_CAPTURES)
        _, end, tail = rest.partition("</script>")
        if start and end:
            write_file(path, f"{head}{start}{_inert(captures)}{end}{tail}")


def page(dump: Dump) -> str:
    """The page. Its data stand in it compressed, in an element that the browser does not run."""
    data = _payload(dump)
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();'
    title = html.escape(f"{dump.title} - swa_compile")
    return _fill(
        _asset("page.html"),
        {
            "TITLE": title,
            "POLICY": policy(script),
            "STYLE": "\n".join(_asset(name) for name in _STYLES),
            "SUMMARY": html.escape(_headline(dump)),
            "CAPTURES": f"{_CAPTURES}{_inert(dump.captures)}</script>",
            "DATA": data,
            "SCRIPT": script,
        },
    )


def policy(script: str) -> str:
    """A content-security policy under which `script` runs, and nothing else, and nothing loads."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _payload(dump: Dump) -> str:
    """zlib-compressed JSON in base64, so that no text of a dump can end the element it stands in.

    Texts are left out, the longest first, while the page would exceed the bound of a dump's file.
    """
    graph = {key: value for key, value in dump.graph.items() if key != "stages"}
    data: dict[str, Any] = {
        "title": dump.title,
        "report": dump.report,
        "graph": graph,
        **_stages(dump),
        "texts": dict(dump.texts),
        "code": dump.code,
        "story": tell(dump),
        "advice": ADVICE,
        "captures_error": dump.captures_error,
        "left_out": [],
    }
    while True:
        raw = json.dumps(data, separators=(",", ":")).encode()
        text = base64.b64encode(zlib.compress(raw, 6)).decode()
        if len(text) <= MAX_BYTES // 2 or not data["texts"]:
            return text
        longest = max(data["texts"], key=lambda name: len(data["texts"][name]))
        del data["texts"][longest]
        data["left_out"].append(longest)


def _stages(dump: Dump) -> dict[str, Any]:
    """The stages with each distinct node once, as `graph.json` has them."""
    table: list[dict[str, Any]] = []
    index: dict[int, int] = {}
    stages = []
    for stage in dump.graph["stages"]:
        order = []
        for node in stage["nodes"]:  # `read_graph` gives equal nodes as one object
            if id(node) not in index:
                index[id(node)] = len(table)
                table.append(node)
            order.append(index[id(node)])
        stages.append({**stage, "nodes": order})
    return {"stages": stages, "nodes": table}


def _headline(dump: Dump) -> str:
    """For readers without JavaScript."""
    report = dump.report
    if not report:
        return "The passes raised on this graph: see error.txt beside this page."
    return (
        f"{report['translations_found']} translations became {report['translation_nodes']} nodes, "
        f"{report['translations_left']} are left in the layer code, {len(report['refused'])} were "
        f"refused; {report['stores_lowered']} of {report['stores_found']} stores were lowered."
    )


def _inert(data: dict[str, Any]) -> str:
    """JSON as a browser reads it in an element, whatever the strings in it say."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _fill(template: str, values: dict[str, str]) -> str:
    """`template` with each "{{NAME}}" replaced once; what is put in is not looked at again."""
    parts = []
    rest = template
    while rest:
        head, found, rest = rest.partition("{{")
        parts.append(head)
        if found:
            name, _, rest = rest.partition("}}")
            parts.append(values[name])
    return "".join(parts)


def _asset(name: str) -> str:
    return files("swa_compile.viewer").joinpath(f"assets/{name}").read_text(encoding="utf-8")
