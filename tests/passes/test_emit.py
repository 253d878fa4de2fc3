"""Nodes that a pass makes carry the fake value that running them gives."""

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._subclasses import FakeTensorMode

from swa_compile.passes.emit import Emitter

BASES = {
    "contiguous": lambda: (torch.zeros(9, 2, 8), torch.zeros(9, 2, 8, dtype=torch.bfloat16)),
    "transposed": lambda: (torch.zeros(2, 9, 8).transpose(0, 1), torch.zeros(9, 8, 2).mT),
    "with gaps": lambda: (torch.zeros(9, 2, 32)[..., :8], torch.zeros(18, 2, 8)[::2]),
    "at an offset": lambda: tuple(torch.zeros(9, 4, 8).split(2, 1)),
    "empty": lambda: (torch.zeros(0, 2, 8), torch.zeros(0, 2, 8)),
}


@pytest.mark.parametrize("kind", BASES)
def test_the_value_of_a_functionalized_call_is_the_wrappers_own(kind):
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    caches = BASES[kind]()
    values = *caches, torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), torch.zeros(3).long()
    nodes = []
    for i, value in enumerate(values):
        nodes.append(graph.placeholder(f"arg{i}"))
        nodes[-1].meta["val"] = mode.from_tensor(value)
    rows = dict(zip(("k", "v", "loc"), nodes[2:], strict=True))
    written = {}
    for i, name in enumerate(("k_cache", "v_cache")):
        written |= {f"_{name}_base_index": i, f"_{name}_alias": True}
    kwargs = {**rows, **written, "_all_bases": nodes[:2]}

    op = torch.ops.swa.store_kv.default
    made = Emitter(graph, nodes[-1]).call(auto_functionalized_v2, op, **kwargs).meta["val"]

    given = {name: node.meta["val"] for name, node in rows.items()}
    with mode:
        want = auto_functionalized_v2(
            op, **given, **written, _all_bases=[n.meta["val"] for n in nodes[:2]]
        )
    assert len(made) == len(want) == 3
    assert made[0] is None and want[0] is None
    for ours, theirs in zip(made[1:], want[1:], strict=True):
        assert ours.fake_mode is mode
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.storage_offset() == theirs.storage_offset()
