"""Tiny transformers models over a hybrid pool, without an edit: an attention function of ours.

The whole model runs with transformers' own attention; a rank's part with ours, sharded by the
plan that the model's configuration brings.
"""

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from swa_compile.kv import LayerSpec
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

WINDOW = 8
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
}
# Mistral's configuration lists no kinds: with a window, every layer slides.
SLIDES = {"gemma3": (True, False), "mistral": (True, True)}
HEAD_DIM = 8


def whole_model(family):
    """The model with seeded weights and transformers' eager attention."""
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**SIZES, head_dim=HEAD_DIM, layer_types=kinds)
        kind = Gemma3ForCausalLM
    else:
        config = MistralConfig(**SIZES, head_dim=HEAD_DIM)
        kind = MistralForCausalLM
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return kind(config).eval().requires_grad_(False)


def specs(family, kv_heads):
    return [
        LayerSpec("swa", kv_heads, HEAD_DIM, window=WINDOW)
        if slides
        else LayerSpec("full", kv_heads, HEAD_DIM)
        for slides in SLIDES[family]
    ]


def over_the_pool(
    module, query, key, value, attention_mask, scaling, sliding_window, batch, pool, **_
):
    """The attention of every layer: each sliding one translates for itself."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    loc, page_table = batch.out_cache_loc, batch.page_table
    if sliding_window is not None:
        mapping = batch.full_to_swa_index_mapping
        loc = translate_loc(mapping, loc)
        page_table = translate_page_table(mapping, page_table, 1).to(torch.int32)
    caches = pool.k_cache(module.layer_idx), pool.v_cache(module.layer_idx)
    store_kv(*caches, k, v, loc)
    out = paged_attention(
        q,
        *caches,
        page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        scale=scaling,
        window=sliding_window,
    )
    return out[None], None


class OverThePool(torch.nn.Module):
    """`forward(batch)` gives the next-token logits of a transformers model."""

    def __init__(self, model, pool):
        super().__init__()
        self.model, self.pool = model, pool

    def forward(self, batch):
        out = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            batch=batch,
            pool=self.pool,
        )
        return out.logits[0][batch.cu_seqlens_q[1:].long() - 1]


def sharded(family, mesh):
    """The model with its linear layers cut over `mesh` as its `base_model_tp_plan` says."""
    AttentionInterface.register("over_the_pool", over_the_pool)
    model = whole_model(family)
    model.set_attn_implementation("over_the_pool")
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {
        name: styles[style]()
        for name, style in model.config.base_model_tp_plan.items()
        if style in styles
    }
    assert {type(style) for style in plan.values()} == set(styles.values())
    parallelize_module(model.model, mesh, plan)
    return model


def whole_sequence(model, tokens):
    """(logits of the last token, K and V `[Hkv, T, D]` of each layer) of one request."""
    with torch.no_grad():
        cache = DynamicCache()
        out = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return out.logits[0, -1], [(layer.keys[0], layer.values[0]) for layer in cache.layers]
