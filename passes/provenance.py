"""Where in the model's code a node comes from."""

from __future__ import annotations

import os
import re

from torch.fx import Node

from .. import ops

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
    """The module that `node` comes from, as "layers.3.attention"; "" outside of any."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path = re.sub(r"^[LG]\['\w+'\]", "", str(stack[-1][0]))  # the variable that holds the model
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("._modules", "").strip(".")
