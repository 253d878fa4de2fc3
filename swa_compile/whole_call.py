"""A whole call of a function, recorded and repeated, at the addresses of all that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from swa_compile.bucket import Inputs, Sizes
from swa_compile.cudagraphs import CapturedGraph, uncaptured
from swa_compile.held import Held, module_of
from swa_compile.padding import Arguments
from swa_compile.recording import Recorder


class WholeCall:
    """A function as one graph a bucket, whether or not code inside it captures itself.

    Args:
        call: runs `fn` on arguments.
        fn: the function; of a module that it belongs to the tensors are looked after.
        arguments: of a call; those of others have the same nesting and number.
        recorder: of the device.
        inside: the captured graphs that `fn` calls. What runs here counts in their record, and
            what cannot be recorded here is left to them.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        fn: Any,
        arguments: Arguments,
        recorder: Recorder,
        inside: Sequence[CapturedGraph],
    ) -> None:
        self._call = call
        self._warm: set[tuple[int, int | None, int]] = set()
        module = module_of(fn)
        # Its tensors are read behind the back of the arguments, and may be replaced.
        self._held = Held(module) if module is not None else None
        self._arguments: Any = None
        self._count = len(pytree.tree_leaves(arguments))
        self._key: tuple[int, int | None, int] = (0, None, 0)
        first = self._count + 1
        count = len(self._held.tensors()) if self._held is not None else 0
        # Which tensors `fn` writes is not known, so that none is read from a copy. The version
        # stands for the layouts of those that are held.
        inputs = Inputs(static=frozenset(range(first, first + count)), bound=True)
        captures = inside[0].captures if inside else None  # what reports show
        self.graph = CapturedGraph(
            self._flat, recorder, inputs=inputs, mode="full", captures=captures
        )

    def __call__(self, arguments: Arguments, tokens: int, requests: int | None) -> Any:
        """`fn` on the static inputs of the bucket of so many tokens and requests."""
        values, self._arguments = pytree.tree_flatten(arguments)
        self.graph.sizes = Sizes(tokens, tokens == requests)
        version = 0
        if self._held is not None:
            held = self._held.tensors()
            version = self._held.version
            values += [version, *held]
            if version != self._key[2]:
                self._warm.clear()
                self.graph.forget()  # those of the module as it was are never repeated
        self._key = (tokens, requests, version)
        *flat, spec = self.graph(values)
        return pytree.tree_unflatten(flat, spec)

    def _flat(self, values: list[Any]) -> list[Any]:
        arguments = pytree.tree_unflatten(values[: self._count], self._arguments)
        if self._key in self._warm:
            result = self._call(arguments)
        else:
            self._warm.add(self._key)
            with uncaptured():  # what is inside would take this for its own first meeting
                result = self._call(arguments)
        flat, spec = pytree.tree_flatten(result)
        return [*flat, spec]  # for other layouts of what is live it may be another
