"""How many compilations the sizes of a day's batches take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swa_compile import collect, mark_sizes
from swa_compile.bench.record import Row
from swa_compile.bench.steps import Say
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer

SIZES = (0, 1, 2, 8, 64)

# (name, backend, dynamic=, sizes are marked). Dynamo decides in the first two: no Inductor needed.
_WAYS: tuple[tuple[str, str, bool | None, bool], ...] = (
    ("default", "swa_eager", None, False),
    ("dynamic=True", "swa_eager", True, False),
    ("mark_sizes", "swa", None, True),
)


@torch.no_grad()
def measure(
    device: torch.device, *, sizes: Sequence[int] = SIZES, say: Say = lambda _: None
) -> Row:
    """Graphs compiled for decode steps of `sizes` requests, one after another, by each way."""
    counts: dict[str, int | str] = {}
    for name, backend, dynamic, marked in _WAYS:
        say(name)
        try:
            counts[name] = _compilations(device, sizes, backend, dynamic, marked)
        except Exception as error:  # a torch that cannot do it is a finding
            counts[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
    return {"sizes": list(sizes), "compilations": counts}


def _compilations(
    device: torch.device, sizes: Sequence[int], backend: str, dynamic: bool | None, marked: bool
) -> int:
    config = HybridConfig(layers=("swa", "full"), d_model=32, head_dim=16, window=8)
    pool = HybridKVPool(config.layer_specs(), max_tokens=200, max_requests=64, device=device)
    model = HybridTransformer(config, pool).to(device).eval()
    torch._dynamo.reset()
    forward = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with collect() as reports:
        for n in sizes:
            requests = [pool.open() for _ in range(n)]
            batch = pool.batch([(request, [request % 7]) for request in requests], width=16)
            if marked:
                mark_sizes(batch)
            forward(batch)
            for request in requests:
                pool.close(request)
    return len(reports)
