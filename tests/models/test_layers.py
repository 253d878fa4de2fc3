"""What the bridge reads off a model, against what its configuration and source say."""

import pytest

from swa_compile.hf import Bridge

from . import families

W = families.WINDOW


def kinds(family, **changes):
    return [layer.spec.window for layer in Bridge(families.build(family, **changes)).layers]


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        # No layer_types: every layer slides.
        ("mistral", [W, W, W, W]),
        ("phimoe", [W, W, W, W]),  # nor the keyword sliding_window
        ("starcoder2", [W, W, W, W]),
        ("qwen3_moe", [W, W, W, W]),
        # By max_window_layers.
        ("qwen2", [None, None, W, W]),
        # Named by layer_types.
        ("gpt_oss", [W, None, W, None]),
        ("llama4_text", [W, None, W, None]),
        ("deepseek_v4", [W, W, W, W]),
        # local_attention counts both sides.
        ("modernbert-decoder", [W, None, W, None]),
    ],
)
def test_windows_are_those_that_the_family_documents(family, windows):
    assert kinds(family) == windows


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"])
def test_without_a_window_every_layer_is_full(family):
    assert kinds(family, sliding_window=None) == [None] * 4


def test_only_layers_that_attend_by_chunks_are_chunked():
    layers = Bridge(families.build("llama4_text")).layers
    assert [layer.spec.chunked for layer in layers] == [True, False, True, False]


def test_heads_and_dimensions_are_those_of_each_layer():
    layers = Bridge(families.build("mimo_v2_flash")).layers
    assert {(s.spec.k_dim, s.spec.v_dim) for s in layers} == {(24, 16)}
    assert [layer.sinks for layer in layers] == [True, False, True, False]
    layers = Bridge(families.build("gemma4_text")).layers
    assert [layer.spec.k_dim for layer in layers] == [16, 24] * 3
    layers = Bridge(families.build("laguna")).layers
    assert [layer.heads for layer in layers] == [4, 6, 4, 6]


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_own_no_cache(family):
    bridge = Bridge(families.build(family))
    assert [layer.cache for layer in bridge.layers] == [0, 1, 2, 3, 2, 3]
    assert [layer.stores for layer in bridge.layers] == [True] * 4 + [False] * 2
    pool = bridge.make_pool(max_tokens=10, max_requests=1)
    assert len(pool.layers) == 4
