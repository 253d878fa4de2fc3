"""The rules in NumPy, one id and one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def each(rule: Callable[[int], int], ids: np.ndarray) -> np.ndarray:
    """`rule` of every id; int64 of the same shape."""
    out = np.empty(ids.shape, np.int64)
    for at in np.ndindex(ids.shape):
        out[at] = rule(int(ids[at]))
    return out


def translate(mapping: np.ndarray, loc: np.ndarray) -> np.ndarray:
    """Token ids through a token mapping."""
    return each(lambda i: -1 if i == -1 else mapping[i], loc)


def translate_pages(mapping: np.ndarray, table: np.ndarray, page: int) -> np.ndarray:
    """Page ids through a token mapping."""
    return each(lambda p: -1 if p == -1 else mapping[p * page] // page, table)


def translate_paged(table: np.ndarray, loc: np.ndarray, page: int) -> np.ndarray:
    """Token ids through a page mapping: tombstones, "none" and strangers go to the sink."""

    def one(i: int) -> int:
        known = 0 <= i // page < len(table) and table[i // page] >= 0
        return table[i // page] * page + i % page if known else 0

    return each(one, loc)


def store(cache: np.ndarray, loc: np.ndarray, rows: np.ndarray) -> None:
    """Row `loc[i]` of `cache` becomes `rows[i]`; a negative slot is the sink."""
    assert len(loc) == len(rows)
    for slot, row in zip(loc, rows, strict=True):
        cache[max(int(slot), 0)] = row


def read(cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The row at each slot, zeros where it is negative."""
    out = np.zeros(slots.shape + cache.shape[1:], cache.dtype)
    for at in np.ndindex(slots.shape):
        if slots[at] >= 0:
            out[at] = cache[slots[at]]
    return out


def attend(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    page_table: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    *,
    page_size: int = 1,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention, one query and one head at a time, in float64."""
    out = np.zeros((*q.shape[:2], v_cache.shape[2]))
    group = q.shape[1] // k_cache.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for b, length in enumerate(seq_lens):
        start, end = cu_seqlens_q[b : b + 2]
        for n in range(start, end):
            at = length - (end - n)
            seen = range(0 if window is None else max(0, at - window + 1), at + 1)
            slots = [page_table[b, t // page_size] * page_size + t % page_size for t in seen]
            for head in range(q.shape[1]):
                k = k_cache[slots, head // group].astype(np.float64)
                scores = k @ q[n, head].astype(np.float64) * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
                out[n, head] = weights / total @ v_cache[slots, head // group]
    return out
