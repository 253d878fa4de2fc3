"""A `torch.compile` backend that hoists full->SWA index translations out of the layer code.

    compiled = torch.compile(model, backend="swa")

See `backend` and `Options` for how to compile, `collect` and `explain` for what was done,
`mark_translation` and `mark_store` for operators of your own, `swa_compile.ops` for ours,
`swa_compile.passes.pipeline` for the passes alone, `swa_compile.kv` for the KV pools,
`verify_ranks` and `swa_compile.distributed` for several ranks.
"""

from typing import TYPE_CHECKING, Any

from swa_compile.backends import backend
from swa_compile.collecting import collect
from swa_compile.explaining import Report, explain
from swa_compile.ops.marks import mark_store, mark_translation
from swa_compile.options import Options
from swa_compile.passes import (
    GraphReport,
    HoistError,
    OptionError,
    PassError,
    Refusal,
    Value,
    pipeline,
)
from swa_compile.passes.tracing import register_logger
from swa_compile.sizes import mark_sizes

if TYPE_CHECKING:
    from swa_compile.distributed import verify_ranks

__all__ = [
    "GraphReport",
    "HoistError",
    "OptionError",
    "Options",
    "PassError",
    "Refusal",
    "Report",
    "Value",
    "backend",
    "collect",
    "explain",
    "mark_sizes",
    "mark_store",
    "mark_translation",
    "pipeline",
    "verify_ranks",
]

register_logger()

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Most processes are the only rank, and some builds of torch have no torch.distributed.
    if name == "verify_ranks":
        from swa_compile.distributed import verify_ranks

        return verify_ranks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
