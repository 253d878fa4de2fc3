"""Model families that the tests compare, logit by logit, with transformers' own attention."""

from __future__ import annotations

# `model_type` of the text config. A family that is not named here is accepted if it agrees with
# its own eager attention on a short sequence; see `self_check`.
FAMILIES = frozenset(
    {
        "afmoe",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v4",
        "dots1",
        "exaone4",
        "exaone_moe",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
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
        "muse_glimmer_text",
        "olmo3",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
        "step3p5",
        "vaultgemma",
    }
)
