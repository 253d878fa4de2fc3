"""What the passes raise."""

from __future__ import annotations


class GraphError(RuntimeError):
    """An error about one graph.

    Attributes:
        inputs: where each graph input that the message may name stands among the arguments of the
            compiled callable, so that a backend can put the user's names in.
    """

    inputs: dict[str, int]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.inputs = {}


class PassError(GraphError):
    """A pass produced a graph that breaks its own rules: a bug in the pass, never in the model.

    Raised instead of handing on a graph that might write a wrong cache row. The message names
    the pass, the node and the option that turns the pass off.
    """


class HoistError(GraphError):
    """`strict=True`, and a translation stays in the layer code (or a cache would be copied).

    The message holds one line per refusal: code, source line and reason. Dynamo wraps it, so it
    stands somewhere in the exception chain of the call that compiled.
    """


class OptionError(ValueError):
    """An option that is unknown, of the wrong kind, or refused; the message says what is known."""
