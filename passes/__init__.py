"""FX passes that hoist full->SWA index translations to the start of a compiled forward.

`pipeline()` is the whole of it: a `CustomGraphPass` for Inductor's
`post_grad_custom_pre_pass`. The stages, in order, one file each:

    numbering     which nodes hold the same value
    origins       what a value is computed from, hence whether it may move
    views         what the views over an id tensor are, and how to put them on its translation
    translations  the calls found, grouped into values
    hoist         one `swa::translate_many` node after the last placeholder
    lower         that node as gathers and integer arithmetic
    stores        functionalized KV stores as `index_put`
    invariants    everything else that index inputs alone decide
    materialize   what of the prologue has to be a buffer, made by one kernel
    fuse_rows     on a GPU, one kernel from a layer's projection to its stores
    verify        the proof that nothing was lost or left behind
"""

from .errors import HoistError, OptionError, PassError
from .options import PassOptions
from .pipeline import HoistPipeline, pipeline
from .report import GraphReport, Refusal, Value

__all__ = [
    "GraphReport",
    "HoistError",
    "HoistPipeline",
    "OptionError",
    "PassError",
    "PassOptions",
    "Refusal",
    "Value",
    "pipeline",
]
