"""What transformers has to know of, and the model's configuration while it runs over a pool.

transformers finds attention and mask functions by name, in registries of the process. Ours are
entered once, under names that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swa_compile.hf.attention import NAME, attention_function
from swa_compile.hf.masks import FormRecorder

# The attention implementation of the run in which masks are measured.
MEASURING = "swa_compile_masks"


def register() -> None:
    """Enter the attention function; no mask function, so that the models make no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionInterface.register(MEASURING, attention_function)


def configurations(model: Any) -> list[Any]:
    """The configurations that name an attention implementation: the model's and its parts'."""
    found = [model.config]
    for config in found:
        found += [c for name in config.sub_configs if (c := getattr(config, name, None))]
    # Modules may hold configurations of their own (copies, say).
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found.append(config)
    return list({id(config): config for config in found}.values())


@contextmanager
def attached(configs: Sequence[Any], name: str = NAME) -> Iterator[None]:
    """The model with `configs` attends through `name` inside the block, and as before after it.

    Nothing else of the model is touched.
    """
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, was in zip(configs, before, strict=True):
            config._attn_implementation_internal = was


@contextmanager
def measuring(recorder: FormRecorder) -> Iterator[None]:
    """Inside the block `MEASURING` has `recorder` for its mask function."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionMaskInterface.register(MEASURING, recorder)
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(MEASURING, None)
