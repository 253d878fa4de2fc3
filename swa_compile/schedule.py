"""A call in pieces as a list of launches: what Inductor's code around the pieces does, without it.

Between two replays that code hands addresses around and calls operators. At one set of sizes all of
that comes out the same each time, so that the launches alone are enough: then the host is done with
a layer in the time of two launches, and the device is never waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swa_compile.ops.attention_choice import asked
from swa_compile.pieces import PieceRecording, traced
from swa_compile.recording import Recorder

Step = int | Callable[[], None]

_NOTHING = (None, "")
_ATTENTION = "swa.paged_attention.default"


class Schedule:
    """The launches of one bucket, in order.

    Args:
        steps: numbers of pieces, and what launches an operator between them.
        recordings: of the pieces.
        label: of the bucket, for traces.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        recordings: dict[int, PieceRecording],
        recorder: Recorder,
        label: str,
    ) -> None:
        self._steps = [
            (f"swa piece {step}, {label}", recordings[step].replay)
            if isinstance(step, int)
            else (f"swa attention, {label}", step)
            for step in steps
        ]
        self._launches = [launch for _, launch in self._steps]
        self._recorder = recorder

    def applies(self) -> bool:
        """Whether the operators would launch the same here as they did when it was made."""
        return asked() == _NOTHING

    def run(self) -> None:
        """Launch everything on the current stream."""
        with self._recorder.current():
            if self._recorder.profiled():
                for name, launch in self._steps:
                    with traced(name):
                        launch()
            else:
                for launch in self._launches:
                    launch()


def schedule(
    calls: Sequence[int | str] | None,
    steps: Sequence[Step],
    recordings: dict[int, PieceRecording],
    recorder: Recorder,
    label: str,
) -> Schedule | None:
    """The schedule of a call that has been recorded; None where launches alone are not all of it.

    Args:
        calls: what the code around the pieces calls; None where that is not known.
        steps: what the recording saw of it.
    """
    if asked() != _NOTHING:
        return None  # a kernel of somebody's choice may keep memory between the pieces
    seen = [step if isinstance(step, int) else _ATTENTION for step in steps]
    if calls is None or seen != list(calls):
        return None
    copied = any(recording.placement.buffers for recording in recordings.values())
    unrecorded = any(isinstance(step, int) and step not in recordings for step in steps)
    return None if copied or unrecorded else Schedule(steps, recordings, recorder, label)
