"""Stores: rows of the KV caches written at given slots.

A negative id ("none") goes to the sink row 0, which nobody reads for a live token. Everything is
checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import argument, checked_ids, is_float8
from .library import define, has_triton
from .marks import mark_store
from .store_checks import Rows, check_inputs


def store_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Write row `loc[i]` of each cache with `k[i]`, `v[i]`, cast to the cache's dtype.

    Args:
        k_cache, v_cache: `[rows, H_kv, D]`, written in place through any strides; heads and D of K
            and V may differ. They must not overlap each other.
        k, v: `[N, H_kv, D]`, floating-point (or of the cache's dtype).
        loc: int32 or int64 `[N]`, row ids in `[-1, rows)`; -1 goes to the sink row 0. On a
            sliding-window layer these are translated ids: the store translates nothing. Duplicate
            live ids leave it open which of them is kept.
        k_scale, v_scale: for float8 caches only: k and v are divided by it, and saturate at the
            largest finite value. A float, or a 0-d float32 tensor on the device of the caches.

    Raises:
        TypeError, ValueError: dtype, rank, device or length is wrong, or (on the CPU; a GPU
            asserts on the device) an id is out of range. Nothing is written then.
    """
    if _is_number(k_scale) or _is_number(v_scale):
        if not isinstance(k_scale, Tensor) and not isinstance(v_scale, Tensor):
            torch.ops.swa.store_kv.scalar(k_cache, v_cache, k, v, loc, k_scale, v_scale)
            return
        # No overload takes one of each.
        k_scale, v_scale = _as_tensor(k_scale, k_cache), _as_tensor(v_scale, v_cache)
    torch.ops.swa.store_kv.default(k_cache, v_cache, k, v, loc, k_scale, v_scale)


def store_latent(
    cache: Tensor, latent: Tensor, loc: Tensor, scale: Tensor | float | None = None
) -> None:
    """Write row `loc[i]` of a one-buffer cache (MLA) with `latent[i]`, cast to its dtype.

    Args:
        cache: `[rows, D]` or `[rows, 1, D]`, written in place through any strides.
        latent: `[N, D]` or `[N, 1, D]`, as the cache.
        loc, scale: as for `store_kv`.

    Raises:
        TypeError, ValueError: as `store_kv`.
    """
    if _is_number(scale):
        torch.ops.swa.store_latent.scalar(cache, latent, loc, scale)
    else:
        torch.ops.swa.store_latent.default(cache, latent, loc, scale)


def reference_store(cache: Tensor, values: Tensor, ids: Tensor) -> None:
    """The rule of a store, for ids that are in range and values in the cache's dtype."""
    rows = ids.clamp_min(0)
    if is_float8(cache.dtype):  # indexed writes know no float8; its bytes are as good
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    cache[rows] = values


def as_cache_dtype(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """`values` as a cache of `dtype` holds them: float8 divided by `scale` and saturated."""
    if not is_float8(dtype) or (values.dtype is dtype and scale is None):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    scaled = values.float() if scale is None else values.float() / scale
    return scaled.clamp(-limit, limit).to(dtype)


def _is_number(scale: Tensor | float | None) -> bool:
    return scale is not None and not isinstance(scale, Tensor)


def _as_tensor(scale: Tensor | float | None, cache: Tensor) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=cache.device)


def _store_by_reference(op: str, rows: list[Rows], loc: Tensor) -> None:
    """For every device. Makes the rows of all caches before it writes the first."""
    count = min(row.cache.shape[0] for row in rows)
    ids = checked_ids(loc, -1 if count else 0, count, argument(op, "loc"))
    ready = [as_cache_dtype(row.values, row.cache.dtype, row.scale) for row in rows]
    for row, values in zip(rows, ready, strict=True):
        reference_store(row.cache, values, ids.long())


def _store_by_triton(op: str, rows: list[Rows], loc: Tensor) -> None:
    if not has_triton():
        _store_by_reference(op, rows, loc)
        return
    from .store_triton import store, supports

    if not all(supports(row.cache) for row in rows):
        _store_by_reference(op, rows, loc)
        return
    with torch.cuda.device(loc.device):
        store([(row.cache, row.values, row.scale) for row in rows], loc)


def _apart(rows: list[Rows]) -> list[Rows]:
    """`rows` with copies of values that lie in a cache's storage, which the store overwrites."""
    caches = {row.cache.untyped_storage()._cdata for row in rows}
    return [
        row._replace(values=row.values.clone())
        if row.values.untyped_storage()._cdata in caches
        else row
        for row in rows
    ]


def _define(schema: str, rows_of: Callable[..., tuple[list[Rows], Tensor]]) -> None:
    """Define a store from its schema and from what its arguments are: (rows, loc)."""
    op = schema.partition("(")[0].partition(".")[0]

    def kernel_of(write: Callable[[str, list[Rows], Tensor], None]) -> Callable[..., None]:
        @torch.no_grad()
        def kernel(*args: Any) -> None:
            rows, loc = rows_of(*args)
            check_inputs(op, rows, loc)
            write(op, _apart(rows), loc)

        return kernel

    def fake(*args: Any) -> None:
        rows, loc = rows_of(*args)
        check_inputs(op, rows, loc)

    defined = define(
        schema,
        fake=fake,
        every=kernel_of(_store_by_reference),
        CUDA=kernel_of(_store_by_triton),
    )
    written = [i for i, arg in enumerate(defined._schema.arguments) if arg.is_write]
    names = [arg.name for arg in defined._schema.arguments]
    mark_store(defined, caches=written, loc=names.index("loc"))


def _kv_rows(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    loc: Tensor,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> tuple[list[Rows], Tensor]:
    k_scale, v_scale = _as_tensor(k_scale, k_cache), _as_tensor(v_scale, v_cache)
    return [
        Rows("k_cache", k_cache, "k", k, "k_scale", k_scale),
        Rows("v_cache", v_cache, "v", v, "v_scale", v_scale),
    ], loc


def _latent_rows(
    cache: Tensor, latent: Tensor, loc: Tensor, scale: Tensor | float | None = None
) -> tuple[list[Rows], Tensor]:
    return [Rows("cache", cache, "latent", latent, "scale", _as_tensor(scale, cache))], loc


# A schema cannot say "float or tensor". The overload with floats keeps a constant a constant; the
# default, which is tried first, is what tensors or no scales at all give.
_KV = "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor loc, "
_LATENT = "(Tensor(a!) cache, Tensor latent, Tensor loc, "
_define(f"store_kv{_KV}Tensor? k_scale=None, Tensor? v_scale=None) -> ()", _kv_rows)
_define(f"store_kv.scalar{_KV}float? k_scale=None, float? v_scale=None) -> ()", _kv_rows)
_define(f"store_latent{_LATENT}Tensor? scale=None) -> ()", _latent_rows)
_define(f"store_latent.scalar{_LATENT}float? scale=None) -> ()", _latent_rows)
