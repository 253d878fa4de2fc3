"""A progress bar over generated tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with numbers of tokens; nothing is shown unless `shown`."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda tokens: bar.advance(task, tokens)
