"""The options that change what the passes do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import OptionError


@dataclass(frozen=True)
class PassOptions:
    """The part of `swa_compile.Options` that the passes read.

    Attributes:
        strict: raise `HoistError` where a translation stays in the layer code.
        lower_stores: turn functionalized KV stores into `index_put`.
        fuse_rows: on a GPU, compute what leads up to a lowered store in one kernel with it.
        hoist_invariants: move everything that index inputs alone decide into the prologue.
        dump_dir: folder for the text of each stage, or None.
    """

    strict: bool = False
    lower_stores: bool = True
    fuse_rows: bool = True
    hoist_invariants: bool = True
    dump_dir: str | None = None

    @classmethod
    def of(cls, options: Any) -> PassOptions:
        """`options` as PassOptions: None, a mapping, or any object with these attributes.

        Raises:
            OptionError: for a mapping with a key that is no pass option.
        """
        names = [field.name for field in fields(cls)]
        if options is None:
            return cls()
        if isinstance(options, Mapping):
            unknown = sorted(set(options) - set(names))
            if unknown:
                raise OptionError(f"unknown pass options {unknown}; known are {names}")
            return cls(**options)
        return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)})

    def code_key(self) -> str:
        """What of the options changes the compiled code, for the compile-cache key.

        `strict` belongs to it: an entry made without it must not satisfy a strict compile.
        `dump_dir` does not: where a dump goes changes no code.
        """
        return (
            f"strict={self.strict} lower_stores={self.lower_stores} "
            f"fuse_rows={self.fuse_rows} hoist_invariants={self.hoist_invariants}"
        )
