"""What a model's dtype alone does to its results: the same weights and caches in float32.

Two programs that compute the same round in different places, and a deep model carries each rounding
on through its layers: how far depends on the model, so it is measured rather than assumed.
"""

from __future__ import annotations

import copy

from torch import Tensor

from swa_compile.bench.inputs import Setting
from swa_compile.bench.model import natural
from swa_compile.ops import store_kv

# The K and V that a batch wrote, by layer: `[B, kv_heads, head_dim]` each, float32.
Rows = list[tuple[Tensor, Tensor]]


def in_float32(setting: Setting) -> tuple[Tensor, Rows]:
    """The loaded batch, all of it computed in float32, and nothing of `setting` written.

    A layer and its caches are copied when their turn comes: the whole model twice would not fit.

    Returns:
        The output `[B, d_model]` in float32, and the rows that each layer stored.
    """
    decoder, batch, written = setting.decoder, setting.batch, setting.written()
    translated = natural(batch)()
    x, rows = setting.x.float(), []
    for i, (kind, layer) in enumerate(zip(decoder.kinds, decoder.layers, strict=True)):
        loc, table = translated if kind == "swa" else (batch.out_cache_loc, batch.page_table)
        angles = getattr(decoder, f"rope_{kind}")[batch.positions]
        k_cache, v_cache = (cache.float() for cache in decoder.caches(i))
        x = copy.deepcopy(layer).float()(x, angles, loc, table, batch, k_cache, v_cache, store_kv)
        rows.append((k_cache[written[kind]], v_cache[written[kind]]))
    return copy.deepcopy(decoder.norm).float()(x), rows
