"""What ends a command."""

from __future__ import annotations


class UsageError(Exception):
    """The command was called wrongly: exit code 2."""


class CheckFailed(Exception):
    """The command ran, and what it checked does not hold: exit code 1."""
