"""Tiny random models of every family that the bridge knows. Nothing is downloaded."""

import copy

import torch

WINDOW = 8
VOCAB = 96

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # With random weights that are tied a model repeats its input, whatever it attends to.
    "tie_word_embeddings": False,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DENSE = {"mlp_layer_types": ["dense"] * 4}
SPARSE = {"mlp_layer_types": ["dense"] + ["sparse"] * 3}

# `model_type` -> what differs from COMMON.
CONFIGS = {
    "afmoe": {**ALTERNATING, **MOE, "num_experts": 4, "num_dense_layers": 1},
    "cohere2": ALTERNATING,
    "cohere2_moe": {**ALTERNATING, **MOE, "num_experts": 4, "num_shared_experts": 1},
    "cohere_compass_text": {
        **ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            for kind in ALTERNATING["layer_types"][:2]
        },
    },
    "cwm": ALTERNATING,
    "deepseek_v4": {
        **MOE,
        "layer_types": ["sliding_attention"] * 4,
        "mlp_layer_types": ["moe"] * 4,
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "n_routed_experts": 4,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "dots1": {
        **ALTERNATING,
        **MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "exaone4": ALTERNATING,
    "exaone_moe": {**ALTERNATING, **MOE, **SPARSE, "num_experts": 4},
    "gemma2": {**ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_unified_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gpt_oss": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": ALTERNATING,
    "granitemoe_swa": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "laguna": {
        **ALTERNATING,
        **MOE,
        **SPARSE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "num_attention_heads_per_layer": [4, 6, 4, 6],
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": WINDOW,
        "attn_temperature_tuning": False,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "moe_layers": [1, 3],
    },
    "mellum": {**ALTERNATING, **MOE, **SPARSE, "num_experts": 4},
    "mimo_v2_flash": {
        **ALTERNATING,
        **MOE,
        **SPARSE,
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 4,
    },
    "ministral": ALTERNATING,
    "ministral3": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "modernbert-decoder": {
        **ALTERNATING,
        "local_attention": 2 * WINDOW,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "muse_glimmer": ALTERNATING,
    "olmo3": ALTERNATING,
    "phi3": {},
    "phi4_multimodal": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {
        **MOE,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": {**MOE, "use_sliding_window": True, "num_experts": 4},
    "smollm3": {**ALTERNATING, "use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1]},
    "starcoder2": {},
    "step3p7": {**ALTERNATING, **DENSE, "num_sliding_attention_heads": 6},
    "vaultgemma": {**ALTERNATING, "query_pre_attn_scalar": 16},
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# What a family computes only where its configuration says so: name -> family, what differs.
# The borders of RoPE lie below the longest prompt of the tests and above the others.
VARIANTS = {
    "deepseek_v4: compressed layers": (
        "deepseek_v4",
        {
            "layer_types": [
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "sliding_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe"] + ["moe"] * 3,
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 8,
            },
            # With few heads many entries score exactly 0, and a choice among equals is anybody's.
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 3,
        },
    ),
    "gemma3_text: dynamic RoPE on full layers": (
        "gemma3_text",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": DYNAMIC,
            },
        },
    ),
    "llama4_text: temperature tuning": (
        "llama4_text",
        {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5},
    ),
    "mistral: dynamic RoPE": (
        "mistral",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    ),
    "phi3: longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": LONGROPE["short_factor"][:6],
                "long_factor": LONGROPE["long_factor"][:6],
            },
        },
    ),
    "phi4_multimodal: longrope": (
        "phi4_multimodal",
        {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
    ),
    "phimoe: longrope": (
        "phimoe",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
        },
    ),
    "step3p7: experts": (
        "step3p7",
        {
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "swiglu_limits": [0.0, 0.5, 0.0, 0.0],
        },
    ),
}
EVERY = sorted([*CONFIGS, *VARIANTS])

# Language models that come only with a vision part, which is not used here.
# One of each way in which families differ, for `make test`; `make models` runs all.
TELLING = (
    "gemma2",  # softcaps
    "gemma3n_text",  # shared caches
    "gemma4_text",  # heads and dims by kind
    "gpt_oss",  # sinks, experts
    "laguna",  # query heads by layer
    "llama4_text: temperature tuning",  # chunks
    "mimo_v2_flash",  # D_v apart from D, sinks on sliding layers alone
    "mistral",  # every layer slides
    "phi3: longrope",
    "step3p7: experts",
)

WITH_VISION = ("muse_glimmer", "step3p7")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def build(family, dtype=torch.float32, **changes):
    """A model of a family or variant, with weights so large that every key of a query counts."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family, variant = VARIANTS.get(family, (family, {}))
    settings = copy.deepcopy({**COMMON, **CONFIGS.get(family, {}), **variant, **changes})
    if family in WITH_VISION:
        config = AutoConfig.for_model(
            family, text_config=settings, vision_config=VISION, image_token_id=VOCAB - 1
        )
        maker = AutoModelForImageTextToText
    else:
        config = AutoConfig.for_model(family, **settings)
        maker = AutoModelForCausalLM
    config._attn_implementation = "eager"
    model = maker.from_config(config).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 or "sink" in name:
                noise = torch.randn(weight.shape, generator=random)
                fan_in = weight.shape[-1] if weight.dim() >= 2 else 1
                weight.copy_(noise * fan_in**-0.5)
    return model.to(dtype)
