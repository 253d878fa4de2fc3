"""What a MODULE:FACTORY on the command line names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swa_compile.cli.errors import UsageError


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Have imports look in the current folder first, for the whole of a command.

    Also while a factory or a forward runs: imports inside those are common.
    """
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the factory that `target` names: (callable, args, kwargs).

    Raises:
        UsageError: where it names no factory, or the factory returns something else.
    """
    module_name, colon, factory_name = target.partition(":")
    if not (module_name and colon and factory_name):
        raise UsageError(f"'{target}' is not of the form MODULE:FACTORY")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a package that it lies in; not something that it imports.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"there is no module '{module_name}' on the path") from error
        raise
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise UsageError(f"module '{module_name}' has no factory '{factory_name}'")
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise UsageError(
            f"{target} returned {type(made).__name__}; wanted (callable, args) or "
            "(callable, args, kwargs)"
        )
    fn, fn_args, *rest = made
    return fn, tuple(fn_args), dict(rest[0]) if rest else {}
