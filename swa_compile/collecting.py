"""Getting at the reports of what is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from swa_compile.passes.report import GraphReport, deliver, sink, take_recorded


@contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """Collect a `GraphReport` for every graph compiled inside, also when it came from a cache::

        with swa_compile.collect() as reports:
            compiled(*args)
        print(reports[0].summary())

    Nested blocks all see the inner graphs. A graph that stock Inductor (with `passes.pipeline()`
    and without the `swa` backend) takes from its cache is known only when the block ends.
    """
    take_recorded()  # compiled before the block, with nobody asking
    reports: list[GraphReport] = []
    with sink(reports):
        try:
            yield reports
        finally:
            for report in from_caches(reports, take_recorded()):
                deliver(report)


def from_caches(seen: Sequence[GraphReport], recorded: Sequence[GraphReport]) -> list[GraphReport]:
    """Those of `recorded` that no pass published (none is in `seen`): they came from a cache."""
    fresh = [replace(report, dump=None) for report in seen]
    cached = []
    for report in recorded:
        if report in fresh:
            fresh.remove(report)
        else:
            cached.append(replace(report, from_cache=True))
    return cached
