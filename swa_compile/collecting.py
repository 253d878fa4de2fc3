"""Getting at the reports of what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swa_compile.passes.report import GraphReport, deliver, sink, take_undelivered


@contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """Collect a `GraphReport` for every graph compiled inside, also when it came from a cache::

        with swa_compile.collect() as reports:
            compiled(*args)
        print(reports[0].summary())

    Nested blocks all see the inner graphs. The block sees what its own thread compiles (and
    contexts that are copied from it). A graph that stock Inductor (with `passes.pipeline()` and
    without the `swa` backend) takes from its cache is known only when the block ends. Then
    dumps are told, too, how often what was captured has been replayed.
    """
    settle()  # what was compiled before the block belongs to the blocks around it
    reports: list[GraphReport] = []
    with sink(reports):
        try:
            yield reports
        finally:
            settle()
            for report in reports:
                if report.captures is not None:
                    report.captures.write()


def settle() -> None:
    """Give what is known by now to the active collectors; nobody is left waiting for it."""
    for report in take_undelivered():
        deliver(report)
