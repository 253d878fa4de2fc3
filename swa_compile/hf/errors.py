"""What the bridge refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UnsupportedModel(ValueError):
    """A model that cannot be run over a hybrid KV pool; the message names it and says why."""


@contextmanager
def naming(model: Any) -> Iterator[None]:
    """Inside the block a refusal names the model."""
    try:
        yield
    except UnsupportedModel as error:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise UnsupportedModel(f"{name}: {error}") from error.__cause__
