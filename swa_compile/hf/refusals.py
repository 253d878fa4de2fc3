"""What is refused by the configuration alone, before the model runs."""

from __future__ import annotations

from typing import Any

from swa_compile.hf.compression import KINDS
from swa_compile.hf.errors import UnsupportedModel

# Layer kinds of `config.layer_types` that a pool can hold.
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", *KINDS})

_WHAT = {
    "linear_attention": "linear attention keeps a recurrent state",
    "hybrid": "a convolution or a state-space part mixes tokens beside the attention",
    "hybrid_sliding": "a convolution mixes tokens beside the attention",
    "mamba": "a state-space layer keeps a recurrent state",
    "conv": "a convolution keeps the last tokens",
}


def refuse(model: Any) -> None:
    """Raise where the configuration of `model` says that it cannot run over a KV pool.

    Raises:
        TypeError: `model` is no transformers model.
        UnsupportedModel: with the feature and what is wrong with it.
    """
    for part in ("config", "generation_config", "set_attn_implementation", "get_output_embeddings"):
        if not hasattr(model, part):
            raise TypeError(
                f"a causal language model of transformers is wanted; {type(model).__name__} has "
                f"no '{part}'"
            )
    reason = _reason(model, model.config.get_text_config())
    if reason is not None:
        raise UnsupportedModel(reason)


def _reason(model: Any, config: Any) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return "an encoder-decoder attends across sequences"
    if not model.can_generate():
        return "it is no causal language model"
    if not getattr(config, "is_causal", True):
        return "it is not causal (is_causal=False)"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is bidirectional (use_bidirectional_attention)"
    if model.training:
        return "it is in training mode; call model.eval()"
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind not in _KINDS:
            what = _WHAT.get(kind, "it is not attention over plain keys and values")
            return f"layer {index} is '{kind}': {what}"
    if getattr(config, "model_type", None) == "doge":
        return "its layers add a learned mask over keys to the attention scores"
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    if getattr(model.generation_config, "cache_implementation", None) == "quantized":
        return "it asks for a quantized KV cache, which the pool is not"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"its parameters lie on {len(devices)} devices"
    if devices and next(iter(devices)).type == "meta":
        return "its parameters are on the meta device: it has no weights"
    return None
