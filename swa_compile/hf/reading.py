"""The layers of a model, as the pool has to hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from swa_compile.hf.adaptation import Adaptation
from swa_compile.hf.compression import KINDS, read_compression
from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.layers import AttentionLayer
from swa_compile.hf.masks import Form
from swa_compile.hf.probe import Seen, measured_calls
from swa_compile.kv import LayerSpec


def read_layers(
    model: Any, adaptation: Adaptation
) -> tuple[tuple[AttentionLayer, ...], list[LayerSpec], torch.dtype]:
    """The attention layers of `model` in order, the caches that they want, and their dtype.

    Raises:
        UnsupportedModel: naming the first layer that cannot be held in a pool.
    """
    config = model.config.get_text_config()
    calls = measured_calls(model, adaptation, _horizon(config))
    missing = sorted(set(range(config.num_hidden_layers)) - set(calls))
    if missing:
        raise UnsupportedModel(
            f"layer {missing[0]} does not call the attention function: it is of another kind "
            "(recurrent, linear or convolutional), and has a state that a KV pool does not hold"
        )
    layers: list[AttentionLayer] = []
    owners: list[tuple[Tensor, Tensor, int]] = []  # key, value, layer
    for index in range(len(calls)):
        seen = calls[index]
        _refuse_extras(index, seen)
        spec = _spec(index, seen, config)
        owner = _owner(seen, owners)
        if owner is None:
            owners.append((seen.call.key, seen.call.value, index))
            cache, stores = len(owners) - 1, True
        else:
            cache, stores = layers[owner].cache, False
            if layers[owner].spec != spec:
                raise UnsupportedModel(
                    f"layer {index} reads the cache of layer {owner} but sees other keys of it: "
                    f"{spec} and {layers[owner].spec}"
                )
        layers.append(
            AttentionLayer(
                spec=spec,
                cache=cache,
                stores=stores,
                heads=seen.call.query.shape[1],
                sinks=seen.call.sinks is not None,
            )
        )
    specs = [layer.spec for layer in layers if layer.stores]
    for index, layer in enumerate(layers):
        module = calls[index].call.module
        types = getattr(config, "layer_types", None)
        found = read_compression(
            index, module, layer.cache, layer.spec, len(specs), adaptation.stand_ins
        )
        if found is not None:
            compression, own, more = found
            specs = [*specs, *more]
            specs[layer.cache] = own
            layers[index] = dataclasses.replace(layer, spec=own, compression=compression)
        elif types and types[index] in KINDS:
            raise UnsupportedModel(
                f"layer {index} is '{types[index]}', and {type(module).__name__} has no compressor"
            )
    return tuple(layers), specs, calls[0].call.key.dtype


def _horizon(config: Any) -> int:
    names = ("max_position_embeddings", "sliding_window", "attention_chunk_size")
    sizes = [getattr(config, name, None) for name in names]
    return 2 * max([4096, *(size for size in sizes if isinstance(size, int))]) + 3


def _owner(seen: Seen, owners: list[tuple[Tensor, Tensor, int]]) -> int | None:
    """The layer whose very keys and values these are."""
    for key, value, layer in owners:
        if seen.call.key is key and seen.call.value is value:
            return layer
    return None


def _refuse_extras(index: int, seen: Seen) -> None:
    """Raise where a layer asks the attention function for something that it does not do."""
    call = seen.call
    name = f"layer {index} ({type(call.module).__name__})"
    if call.dropout:
        raise UnsupportedModel(f"{name} has attention dropout on: call model.eval()")
    if call.rest.get("is_causal", getattr(call.module, "is_causal", True)) is False:
        raise UnsupportedModel(f"{name} is not causal")
    if isinstance(call.scaling, Tensor) or isinstance(call.softcap, Tensor):
        raise UnsupportedModel(f"{name} computes its scale or softcap in the forward")
    for key, value in call.rest.items():
        if isinstance(value, Tensor) and key not in _HARMLESS:
            raise UnsupportedModel(
                f"{name} hands '{key}' to its attention function, which attention over pages does "
                "not know"
            )


# Tensors that some families pass on to every attention function, and that say nothing new.
_HARMLESS = frozenset({"position_ids", "cache_position", "input_ids"})


def _spec(index: int, seen: Seen, config: Any) -> LayerSpec:
    call, form = seen.call, seen.form
    name = f"layer {index} ({type(call.module).__name__})"
    if call.mask is not None and form is None:
        raise UnsupportedModel(f"{name} changes the attention mask that the model made")
    form = form or _declared(index, call.window, config)
    if form.kind not in ("full", "sliding", "chunked"):
        raise UnsupportedModel(f"{name} has a mask that is {form.kind}")
    return LayerSpec(
        kind="full" if form.kind == "full" else "swa",
        kv_heads=call.key.shape[1],
        k_dim=call.key.shape[3],
        v_dim=call.value.shape[3],
        window=form.size,
        chunked=form.kind == "chunked",
    )


def _declared(index: int, keyword: int | None, config: Any) -> Form:
    """The form by what the model says of it, for a model that makes no mask here.

    The keyword, the configuration's `layer_types`, and, where it has none, its `sliding_window`:
    any of them may be missing.
    """
    if keyword is not None:
        return Form("sliding", keyword)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types else "sliding_attention"
    if kind == "chunked_attention":
        return Form("chunked", config.attention_chunk_size)
    window = getattr(config, "sliding_window", None)
    if kind == "sliding_attention" and window is not None:
        return Form("sliding", window)
    return Form("full")
