"""What Inductor's generated code calls, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_FUNCTION = re.compile(r"^\s*def (?:call|partition_(?P<partition>\d+))\(")
_CALL = re.compile(r"^\s+(?:[\w, ()]+ = )?(?P<callee>[\w.]+(?:\[\d+\])?)\((?P<args>.*)\)\s*$")
_SOURCES = re.compile(r"^\s*# Topologically Sorted Source Nodes: \[(?P<nodes>.*?)\]")
_PIECE = re.compile(r"^self\.partitions\[(\d+)\]$")
_NO_KERNELS = re.compile(
    r"^(assert_\w+|reinterpret_tensor|empty_strided\w*|args\.clear|del|len|print|range|"
    r"get_raw_stream|torch\.cuda\.\w+|\w+\.append|async_compile\.\w+|_?alloc_from_pool|raw_stream\w*"
    r"|torch\._C\.\w+.*|\w*device\w*guard\w*|with|if|for|return)$",
    re.IGNORECASE,
)


def kernel_calls(code: str, mappings: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every kernel call of the generated `code`, in the order of the file.

    Args:
        code: a module that Inductor wrote.
        mappings: names that graph inputs have there; a call that is given one reads a mapping.

    Returns:
        Dicts with "line" (from 1), "name", "kind" ("generated", "library" or "operator"), "nodes"
        (the graph's nodes that it computes, as Inductor's comment says), "partition" (None where
        the code is in one piece) and "mapping" (bool).
    """
    wanted = [re.compile(rf"\b{re.escape(name)}\b") for name in mappings]
    found = []
    inside, partition, nodes = False, None, ""
    for number, line in enumerate(code.splitlines(), 1):
        function = _FUNCTION.match(line)
        if function:
            inside = True
            partition = int(function["partition"]) if function["partition"] else None
            continue
        if inside and line and not line[0].isspace():
            inside = False
        if not inside:
            continue
        source = _SOURCES.match(line)
        if source:
            nodes = source["nodes"]
        call = _CALL.match(line)
        if call is None or _NO_KERNELS.match(call["callee"]) or _PIECE.match(call["callee"]):
            continue
        callee = call["callee"].removesuffix(".run")
        found.append(
            {
                "line": number,
                "name": callee,
                "kind": _kind(callee),
                "nodes": nodes,
                "partition": partition,
                "mapping": any(pattern.search(call["args"]) for pattern in wanted),
            }
        )
        nodes = ""
    return found


def _kind(callee: str) -> str:
    if callee.startswith(("extern_kernels.", "aoti_torch")):
        return "library"
    return "operator" if callee.startswith("torch.ops.") else "generated"
