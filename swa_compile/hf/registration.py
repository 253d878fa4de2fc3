"""What transformers has to know of, and the model's configuration while it runs over a pool.

transformers finds attention and mask functions by name, in registries of the process. Ours are
entered once, under names that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Iterator
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


@contextmanager
def attached(model: Any, name: str = NAME) -> Iterator[None]:
    """The model attends through `swa_compile` inside the block, and as before after it.

    All that changes is the name of the attention implementation in its configurations.
    """
    configs = [model.config]
    for config in configs:
        for key in config.sub_configs:
            sub = getattr(config, key, None)
            if sub is not None:
                configs.append(sub)
    # Modules may hold configurations of their own (copies, say).
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal") and not any(
            config is known for known in configs
        ):
            configs.append(config)
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, was in zip(configs, before, strict=True):
            config._attn_implementation_internal = was


@contextmanager
def measuring(model: Any, recorder: FormRecorder) -> Iterator[None]:
    """Inside the block the model runs with `recorder` for its mask function."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionMaskInterface.register(MEASURING, recorder)
    try:
        with attached(model, MEASURING):
            yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(MEASURING, None)
