"""The live record of what was captured of one compiled graph, and what was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# A skipped size repeats for ever; the record holds so many different skips and counts the rest.
_SKIPS_KEPT = 64


@dataclass(frozen=True)
class Skip:
    """Something that was not captured.

    Attributes:
        message: why, and what the author can do.
        argument: the graph input that is the reason, by its name in the user's code, or "".
        source: "file:line" of its first use, or "".
        tokens: the size that it happened at, where it is about one size.
        code: always CAPTURE_SKIPPED, as refusals have a code.
    """

    message: str
    argument: str = ""
    source: str = ""
    tokens: int | None = None
    code: str = "CAPTURE_SKIPPED"

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.code}{where}: {self.message}"


@dataclass(frozen=True)
class Recorded:
    """What is repeated at one bucket.

    Attributes:
        whole: one graph of the whole call.
        pieces: else, numbers of the pieces that have a graph; none where it runs uncaptured.
        direct: the pieces and the operators between them are launched without running the code
            around them.
    """

    whole: bool = False
    pieces: tuple[int, ...] = ()
    direct: bool = False


@dataclass
class Captures:
    """What happened to one compiled graph so far; it goes on counting.

    A bucket is one set of sizes of the graph's inputs.

    Attributes:
        mode: "full", "piecewise" or "auto", as asked for.
        pieces: pieces that Inductor cut the graph into; 0 where it was not cut.
        captures: CUDA graphs recorded: one a piece and bucket, or one a bucket.
        replays: calls that were answered by replaying graphs, in whole or in part.
        full_replays: those of them that replayed one graph for the whole call.
        direct_replays: those of them that replayed pieces, and launched the operators between
            them, without running the code around them.
        uncaptured: calls that ran without any graph: first meetings, other sizes, N = 0.
        recaptured: buckets recorded anew because a tensor that a graph is bound to had moved.
        copied_inputs: tensors copied into a buffer of the graph's, over all calls.
        memory: bytes that recording each bucket added to the graph's memory pools.
        recorded: what is repeated at each bucket that was met twice.
        skipped: what was not captured, and why.
        further_skips: how many more there were of which no record is kept.
    """

    mode: str = "auto"
    pieces: int = 0
    captures: int = 0
    replays: int = 0
    full_replays: int = 0
    direct_replays: int = 0
    uncaptured: int = 0
    recaptured: int = 0
    copied_inputs: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    recorded: dict[str, Recorded] = field(default_factory=dict)
    skipped: list[Skip] = field(default_factory=list)
    further_skips: int = 0

    def __post_init__(self) -> None:
        self._write: Callable[[], None] | None = None  # no field: a file is no part of the record

    def write_with(self, write: Callable[[], None]) -> None:
        """Have `write` keep a copy of this record on disk, now and where `write` is called."""
        self._write = write
        write()

    def write(self) -> None:
        """Bring the copy in the dump up to date; nothing where there is no dump."""
        if self._write is not None:
            self._write()

    def note(self, bucket: str, recorded: Recorded) -> None:
        """Say what is repeated at `bucket` from now on, also in the dump.

        Where tensors move, a bucket is recorded again and again with the same outcome: that is
        written once.
        """
        if self.recorded.get(bucket) != recorded:
            self.recorded[bucket] = recorded
            self.write()

    def skip(self, skip: Skip) -> bool:
        """Keep `skip`; False where it is known already, or there are too many."""
        if skip in self.skipped:
            return False
        if len(self.skipped) >= _SKIPS_KEPT:
            self.further_skips += 1
            return False
        self.skipped.append(skip)
        return True

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        # From copies: a call in another thread may be adding to the record. By hand: `asdict` takes
        # long for many sizes of many pieces, and this is done for each that is recorded.
        recorded = dict(self.recorded)
        return {
            **{about.name: getattr(self, about.name) for about in fields(self)},
            "memory": dict(self.memory),
            "recorded": {
                size: {"whole": r.whole, "pieces": list(r.pieces), "direct": r.direct}
                for size, r in recorded.items()
            },
            "skipped": [asdict(skip) for skip in list(self.skipped)],
        }

    def summary(self) -> str:
        """Readable lines."""
        lines = [
            f"{self.captures} CUDA graphs of {len(self.memory)} sizes ({self.mode}, "
            f"{sum(self.memory.values()) / 2**20:.1f} MiB): {self.replays} calls replayed, "
            f"{self.uncaptured} not; {self.copied_inputs} inputs copied, "
            f"{self.recaptured} captures renewed"
        ]
        lines += [f"  {skip}" for skip in self.skipped]
        if self.further_skips:
            lines.append(f"  and {self.further_skips} more skips")
        return "\n".join(lines)
