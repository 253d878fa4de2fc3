"""What the passes raise."""

from __future__ import annotations


class PassError(RuntimeError):
    """A pass produced a graph that breaks its own rules: a bug in the pass, never in the model.

    Raised instead of handing on a graph that might write a wrong cache row. The message names
    the pass, the node and the option that turns the pass off.
    """


class HoistError(RuntimeError):
    """`strict=True`, and a translation stays in the layer code (or a cache would be copied).

    The message holds one line per refusal: code, source line and reason. Dynamo wraps it, so it
    stands somewhere in the exception chain of the call that compiled.
    """


class OptionError(ValueError):
    """An option that is unknown, of the wrong kind, or refused; the message says what is known."""
