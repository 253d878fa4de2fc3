"""The operands are random, and those that a step has in an engine."""

from dataclasses import fields, replace

import pytest
import torch

from swa_compile.bench.configs import CONFIGS, Shape
from swa_compile.bench.inputs import Setting

SMALL = CONFIGS["small"]
SINKS = replace(SMALL, sinks=True, post_norms=True, mlp="geglu", qk_norm=False)


@pytest.fixture(params=[SMALL, SINKS, replace(SMALL, mlp="swiglu")])
def setting(request):
    with torch.no_grad():
        return Setting.make(request.param, Shape.of(request.param, 6), torch.device("cpu"))


def test_nothing_that_is_computed_with_is_zero(setting):
    for name, tensor in [*setting.decoder.named_parameters(), *setting.decoder.named_buffers()]:
        if not name.startswith("rope"):  # sin(0)
            assert tensor.count_nonzero() > 0.99 * tensor.numel(), name
            assert tensor.float().std() > 0, name
    assert setting.x.std() > 0.5


def test_batches_are_those_of_a_scheduler(setting):
    config, shape, batch = setting.config, setting.shape, setting.batch
    for seed in (0, 1):
        setting.load(seed)
        batch.validate()
        mapping, table, lens = (
            t.numpy() for t in (batch.full_to_swa_index_mapping, batch.page_table, batch.seq_lens)
        )
        assert len(mapping) == config.full_tokens + 2 and mapping[-1] == -1
        live = mapping[mapping > 0]
        assert len(set(live)) == len(live) == config.swa_tokens - 1
        assert (lens >= shape.window).all() and (lens <= shape.context).all()
        for row, length, loc in zip(table, lens, batch.out_cache_loc.tolist(), strict=True):
            assert row[length - 1] == loc
            assert (mapping[row[:length]] > 0).all() and (row[length:] == 0).all()
        rows = setting.written()["swa"].tolist()
        assert len(set(rows)) == len(rows) and 0 not in rows
        assert max(batch.out_cache_loc.tolist()) >= config.swa_tokens


def test_loading_changes_contents_and_keeps_addresses(setting):
    setting.load(0)
    tensors = [getattr(setting.batch, field.name) for field in fields(setting.batch)]
    before = [(t.data_ptr(), t.clone()) for t in tensors]
    setting.load(1)
    assert [t.data_ptr() for t in tensors] == [address for address, _ in before]
    mapping = setting.batch.full_to_swa_index_mapping
    assert not torch.equal(mapping, before[-1][1])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0,), "batch is at least 1; got 0"),
        ((4, 32, 16), "a context of 16 tokens does not fill a window of 32"),
        ((128,), "127 SWA slots; batch 128"),
    ],
)
def test_sizes_that_cannot_be_run_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        Shape.of(SMALL, *sizes)


def test_the_configurations_have_the_shapes_that_they_are_named_after():
    ref, oss, gemma = (CONFIGS[name] for name in ("ref24", "gpt-oss-20b", "gemma-3"))
    assert ref.layers == ("swa",) * 24 and ref.full_tokens == 262_144
    assert (ref.d_model, ref.heads, ref.kv_heads, ref.head_dim) == (2048, 32, 8, 64)
    assert oss.layers[:3] == ("swa", "full", "swa") and len(oss.layers) == 24
    assert (oss.d_model, oss.heads, oss.kv_heads, oss.sinks, oss.qk_norm) == (
        *(2880, 64, 8),
        *(True, False),
    )
    assert len(gemma.layers) == 48 and gemma.layers.count("full") == 8
    assert (gemma.d_model, gemma.heads, gemma.head_dim, gemma.window) == (3840, 16, 256, 1024)
