"""What tests of fused rows share: ids, caches, and code with fused rows beside eager code."""

import numpy as np
import torch

import swa_compile

FULL, ROWS, N = 300, 96, 7


def ids(n=N, seed=0):
    rng = np.random.default_rng(seed)
    mapping = np.append(rng.permutation(FULL) % (ROWS - 1) + 1, -1)
    pick = {int(mapping[i]): int(i) for i in rng.permutation(np.arange(ROWS, FULL))}
    loc = rng.permutation(list(pick.values()))[:n]
    return torch.from_numpy(mapping), torch.from_numpy(loc)


def pools(*shapes, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def agree(fused, forward, args, caches, *, stores=1, n_fused=1, outputs=True, **kwargs):
    """Eager and fused code leave the same rows and outputs; as many stores are fused as said."""
    mine = [cache.clone() for cache in caches]
    with torch.no_grad(), swa_compile.collect() as reports:
        want = forward(*args, caches)
        got = fused(forward, **kwargs)(*args, mine)
    (report,) = reports
    assert (report.stores_lowered, report.rows_fused) == (stores, n_fused)
    if outputs and want is not None:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for before, after in zip(caches, mine, strict=True):
        # Not even rounding differs: the rule runs the operators that eager code runs.
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    return report
