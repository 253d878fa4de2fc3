"""Where in the model's code a node comes from."""

from __future__ import annotations

import os
import re

from torch.fx import Node

from .. import ops

# One step of a path as Dynamo writes it.
_PART = re.compile(r"\._(?:modules|buffers|parameters)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")

_OPS_FOLDER = os.path.dirname(ops.__file__) + os.sep


def source_line(node: Node) -> str:
    """ "file:line" of the model's own code that `node` comes from, or "" where it is not known.

    The innermost frame that does not lie in our ops: their typed wrappers are not where a user
    would look.
    """
    place = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if line.strip().startswith('File "'):
            path, _, rest = line.strip()[len('File "') :].partition('", line ')
            if not path.startswith(_OPS_FOLDER):
                place = f"{path}:{rest.split(',')[0]}"
    return place


def module_path(node: Node) -> str:
    """The innermost module that `node` was traced in, as "layers.3.attention"; "" outside of any.

    Without the variable that holds the model.
    """
    path = ""
    for entry in (node.meta.get("nn_module_stack") or {}).values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    path = re.sub(r"^[LG]\['[^']*'\]", "", path)
    return _PART.sub(lambda m: "." + next(g for g in m.groups() if g), path).strip(".")
