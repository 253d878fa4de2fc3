"""Model families that the tests compare, logit by logit, with transformers' own attention."""

from __future__ import annotations

from typing import Any

# `model_type` of a model's configuration. A family that is not named here is accepted if it agrees
# with its own eager attention on a short sequence; see `self_check`.
FAMILIES = frozenset(
    {
        "afmoe",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v4",
        "dots1",
        "exaone4",
        "exaone_moe",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "laguna",
        "llama4_text",
        "mellum",
        "mimo_v2_flash",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "modernbert-decoder",
        "muse_glimmer",
        "olmo3",
        "phi3",
        "phi4_multimodal",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
        "step3p7",
        "vaultgemma",
    }
)


def is_tested(model: Any) -> bool:
    """Whether `model` is transformers' own class of one of the families."""
    own = type(model).__module__.startswith("transformers.models.")
    return own and model.config.model_type in FAMILIES
