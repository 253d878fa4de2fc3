"""The whole model on one process, eager and without a process group, and how to compare with it."""

from functools import cache

from .programs import steps


@cache
def whole_run(kv_heads=4, layers=None):
    """Logits of each step, caches and mapping of the unsharded model; nobody may change them."""
    changed = {"kv_heads": kv_heads, "layers": layers or steps.CONFIG.layers}
    config = steps.HybridConfig(**{**vars(steps.CONFIG), **changed})
    model, pool = steps.whole_model(config=config)
    logits = steps.run(model, pool)
    return logits, steps.rows(pool), pool.full_to_swa_index_mapping


def close(got, want, atol=2e-5):
    """Logits of every step."""
    assert [tuple(step.shape) for step in got] == [tuple(step.shape) for step in want]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        off = float((a - b).abs().max()) if a.numel() else 0.0
        assert off <= atol, f"step {i}: logits differ by {off}"


def same_rows(got, want, atol=1e-5):
    """Every row of every cache but the sink's, and some of them written."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        for name, ours, theirs in zip("kv", a, b, strict=True):
            ours, theirs = ours[1:], theirs[1:]
            assert ours.shape == theirs.shape, (i, name)
            assert theirs.any(), f"layer {i}: nothing was written, so nothing is compared"
            differ = (ours - theirs).abs().flatten(1).amax(1) > atol
            differ |= ours.isnan().flatten(1).any(1)
            assert not differ.any(), f"layer {i}, {name}: rows {differ.nonzero().flatten() + 1}"
