"""What the bridge refuses."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """A model that cannot be run over a hybrid KV pool; the message names it and says why."""
