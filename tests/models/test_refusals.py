"""What the bridge refuses, by name and reason, and what an unknown family has to show."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from swa_compile.hf import FAMILIES, HybridGenerator, UnsupportedModel

from . import families, runs

SIZES = {"max_tokens": 100, "max_requests": 2, "backend": None}

LINEAR = ["linear_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Family, what its configuration says, and what the refusal has to say.
BY_CONFIG = [
    ("minimax", {**EXPERTS, "layer_types": LINEAR, "block_size": 4}, "layer 0 is 'linear_att"),
    ("mamba", {"state_size": 8}, "recurrent state"),
    ("falcon_h1", {}, "layer 0 is 'hybrid'"),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "layer 0 is 'conv'"),
    ("doge", {}, "learned mask over keys"),
    ("zaya", {"num_experts": 4, "moe_intermediate_size": 32}, "layer 0 is 'hybrid'"),
    (
        "llama4_text",
        {"rope_parameters": families.DYNAMIC},
        "RoPE of type 'dynamic' is chosen by the longest request of the forward, and "
        "Llama4TextRotaryEmbedding computes it in a way that cannot be told by the request",
    ),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ("bloom", {}, "attention interface"),
]


def refusal(model, **sizes):
    with pytest.raises(UnsupportedModel) as caught:
        HybridGenerator(model, **{**SIZES, **sizes})
    message = str(caught.value)
    assert type(model).__name__ in message and model.config.model_type in message
    return message


@pytest.mark.parametrize(
    ("family", "changes", "words"), BY_CONFIG, ids=[family for family, _, _ in BY_CONFIG]
)
def test_refused_by_its_configuration_before_anything_runs(family, changes, words):
    model = families.build(family, **changes)

    def ran(*args, **kwargs):
        raise AssertionError("the model ran")

    model.forward = ran
    assert words in refusal(model)


def test_encoder_decoders_are_refused():
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 96}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads)).eval()
    assert "encoder-decoder" in refusal(model)


def test_training_mode_quantized_caches_and_missing_weights_are_refused():
    assert "model.eval()" in refusal(families.build("mistral").train())
    model = families.build("mistral")
    model.generation_config.cache_implementation = "quantized"
    assert "quantized KV cache" in refusal(model)
    assert "meta device" in refusal(families.build("mistral").to("meta"))


def test_what_is_no_transformers_model_is_a_type_error():
    with pytest.raises(TypeError, match="Linear has no 'config'"):
        HybridGenerator(torch.nn.Linear(2, 2), **SIZES)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 64}, "layer 0 does not call"),
        ("diffllama", {}, "layer 0 (DiffLlamaAttention) attends twice"),
        ("nemotron", {}, "does not hand its keyword arguments on"),
        ("bert", {}, "is not causal"),
    ],
)
def test_refused_by_what_its_layers_do_in_a_forward_of_two_tokens(family, changes, words):
    model = families.build(family, **changes)
    assert words in refusal(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_an_unknown_family_is_accepted_if_it_agrees_with_its_own_attention(family):
    assert family not in FAMILIES
    model = families.build(family)
    generator = HybridGenerator(model, **SIZES)
    prompts = runs.prompts()
    for prompt, logits in zip(prompts, generator.prefill(prompts), strict=True):
        want = runs.eager_logits(model, prompt)[-1]
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-4


def test_a_class_that_only_bears_a_known_name_is_no_known_family():
    """Code that came with a checkpoint may call itself what it likes."""
    model = families.build("mistral")
    checked = []

    class Mistral(type(model)):
        def forward(self, *args, **kwargs):
            checked.append(self.config._attn_implementation)
            return super().forward(*args, **kwargs)

    HybridGenerator(model, **SIZES)
    model.__class__ = Mistral
    HybridGenerator(model, **SIZES)
    assert "eager" in checked  # the self-check asks the model's own attention


def changed_llama(attention):
    """A Llama whose attention layers compute `attention(self, original, hidden_states, ...)`."""
    model = families.build("llama")
    assert isinstance(model, LlamaForCausalLM)
    for layer in model.model.layers[2:]:
        module = layer.self_attn
        original = module.forward

        def forward(hidden_states, *args, module=module, original=original, **kwargs):
            return attention(module, original, hidden_states, *args, **kwargs)

        module.forward = forward
    return model


def test_an_unknown_family_that_mixes_tokens_beside_attention_is_refused_at_that_layer():
    def shifted(module, original, hidden_states, *args, **kwargs):
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return original(hidden_states + before, *args, **kwargs)

    message = refusal(changed_llama(shifted))
    assert "query in layer 2 (LlamaAttention) of a token depends on the other tokens" in message


def test_an_unknown_family_that_counts_positions_itself_is_refused():
    def counted(module, original, hidden_states, *args, **kwargs):
        positions = torch.arange(hidden_states.shape[1]).view(1, -1, 1)
        return original(hidden_states * (1 + positions), *args, **kwargs)

    assert "counts positions itself" in refusal(changed_llama(counted))


def test_an_unknown_family_whose_attention_is_its_own_is_refused_with_the_difference():
    def halved(module, original, hidden_states, *args, **kwargs):
        out, weights = original(hidden_states, *args, **kwargs)
        return (out / 2 if module.config._attn_implementation == "eager" else out), weights

    message = refusal(changed_llama(halved))
    assert "differ from those of its own eager attention by" in message


def test_a_known_family_that_hands_more_to_its_attention_is_refused(monkeypatch):
    """A keyword that attention over pages does not know would be dropped in silence."""

    def biased(module, original, hidden_states, *args, **kwargs):
        return original(hidden_states, *args, score_bias=torch.zeros(1), **kwargs)

    assert "hands 'score_bias' to its attention" in refusal(changed_llama(biased))


def test_a_mask_that_the_layer_changes_is_refused():
    def masked(module, original, hidden_states, *args, attention_mask=None, **kwargs):
        mask = attention_mask * torch.rand(attention_mask.shape)
        return original(hidden_states, *args, attention_mask=mask, **kwargs)

    assert "changes the attention mask" in refusal(changed_llama(masked))


def test_the_model_is_left_as_it_was():
    model = families.build("mistral")
    before = copy.deepcopy(model.config.to_dict())
    generator = HybridGenerator(model, **SIZES)
    prompt = runs.prompts()[0]
    wanted = runs.eager_logits(model, prompt)
    generator.generate([prompt], 2)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "eager"
    assert torch.equal(runs.eager_logits(model, prompt), wanted)
    assert modeling_llama.LlamaForCausalLM is LlamaForCausalLM


def test_the_attention_function_says_who_has_to_call_it():
    model = families.build("mistral")
    HybridGenerator(model, **SIZES)
    model.set_attn_implementation("swa_compile")
    with pytest.raises(RuntimeError, match=r"run the model through swa_compile\.hf"):
        model(input_ids=torch.tensor([[3, 4]]))
