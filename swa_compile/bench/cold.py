"""Cold compilations. The benchmark's one use of a private interface of torch, with a fallback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cold_caches() -> Iterator[None]:
    """Nothing that was compiled before is found inside, in memory or on disk."""
    from torch._inductor import utils

    torch._dynamo.reset()
    fresh = getattr(utils, "fresh_cache", None) or getattr(utils, "fresh_inductor_cache", None)
    if fresh is not None:
        with fresh():
            yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
