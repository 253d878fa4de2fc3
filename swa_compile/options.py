"""What a user can set on `backend="swa"`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from swa_compile.passes.errors import OptionError

_CUDAGRAPH_MODES = ("off", "full", "piecewise", "inductor", "auto")

# Inductor options that would break a promise of this package, with the reason.
_REFUSED: dict[str, str] = {
    "freezing": "it bakes the mapping into the code, and later edits of it are not seen",
    "post_grad_custom_pre_pass": "the hoist stands there; use post_grad_custom_post_pass",
    "triton.cudagraphs": "use the option cudagraphs='inductor'",
    "graph_partition": "use the options cudagraphs and split_ops",
    "custom_should_partition_ops": "use the option split_ops",
}


@dataclass(frozen=True)
class Options:
    """Options of the `swa` and `swa_eager` backends.

    Attributes:
        cudagraphs: what is captured on a GPU: nothing ("off"), each call as a whole ("full"), the
            pieces between `split_ops` ("piecewise"), either as the call wants it ("auto": as a
            whole where each request has one token), or what torch's cudagraph trees make of it
            ("inductor"). See docs/cudagraphs.md.
        capture_sizes: token counts to capture; empty for each size that is met.
        strict: raise `HoistError` where a translation stays in the layer code, the generated code
            copies a KV cache or reads a mapping late, or a requested capture is skipped.
        lower_stores: turn stores into code that Inductor fuses with what produces k and v.
        fuse_rows: on a GPU, have one kernel do what leads up to a lowered store (qk-norm, RoPE,
            quantization), for K, V and the queries.
        hoist_invariants: hoist everything that index inputs alone decide, not only translations.
        split_ops: operators at which piecewise graphs are cut, as "namespace::name".
        dump_dir: where to write dumps; the environment variable SWA_COMPILE_DUMP does the same.
        inductor: further Inductor options, passed through.

    Raises:
        OptionError: for a value of the wrong kind, or an Inductor option that is refused.
    """

    cudagraphs: str = "auto"
    capture_sizes: tuple[int, ...] = ()
    strict: bool = False
    lower_stores: bool = True
    fuse_rows: bool = True
    hoist_invariants: bool = True
    split_ops: tuple[str, ...] = ("swa::paged_attention",)
    dump_dir: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options | Mapping[str, Any] | None) -> Options:
        """`options` as Options.

        Raises:
            OptionError: for an unknown key; the message lists the known ones.
        """
        if isinstance(options, cls):
            return options
        given = dict(cast("Mapping[str, Any]", options or {}))
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise OptionError(
                f"unknown option{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))}; "
                f"known options are {', '.join(known)}"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        if self.cudagraphs not in _CUDAGRAPH_MODES:
            raise OptionError(
                f"option cudagraphs is one of {', '.join(_CUDAGRAPH_MODES)}; "
                f"got {self.cudagraphs!r}"
            )
        for name in ("strict", "lower_stores", "fuse_rows", "hoist_invariants"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"option {name} is True or False; got {getattr(self, name)!r}")
        object.__setattr__(self, "capture_sizes", _sequence(self, "capture_sizes"))
        object.__setattr__(self, "split_ops", _sequence(self, "split_ops"))
        for size in self.capture_sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise OptionError(f"option capture_sizes holds token counts >= 0; got {size!r}")
        if self.capture_sizes and self.cudagraphs == "off":
            raise OptionError("option capture_sizes asks for captures, and cudagraphs is 'off'")
        for op in self.split_ops:
            if not isinstance(op, str) or op.count("::") != 1:
                raise OptionError(f"option split_ops holds names like 'swa::store_kv'; got {op!r}")
        if self.dump_dir is not None:
            if not isinstance(self.dump_dir, (str, os.PathLike)):
                raise OptionError(f"option dump_dir is a path; got {self.dump_dir!r}")
            object.__setattr__(self, "dump_dir", os.fspath(self.dump_dir))
        if not isinstance(self.inductor, Mapping):
            raise OptionError(f"option inductor is a mapping; got {type(self.inductor).__name__}")
        spelled = {str(key).replace("-", "_"): value for key, value in self.inductor.items()}
        object.__setattr__(self, "inductor", spelled)  # torch takes both spellings, too
        for key, why in _REFUSED.items():
            if self.inductor.get(key):
                raise OptionError(f"Inductor option '{key}' is refused: {why}")
        if self.inductor.get("enable_auto_functionalized_v2") is False:
            raise OptionError(
                "Inductor option 'enable_auto_functionalized_v2' is refused as False: version 1 of "
                "torch's wrapper clones whole KV caches and can write wrong rows"
            )


def _sequence(options: Options, name: str) -> tuple[Any, ...]:
    value = getattr(options, name)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise OptionError(f"option {name} is a list or a tuple; got {value!r}")
