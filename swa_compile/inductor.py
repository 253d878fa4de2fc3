"""The one place that touches Inductor's private interfaces.

Written against torch 2.11 to 2.14. What a version lacks is looked up with a default, so that a
renamed detail costs a figure in the report and never the compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from swa_compile.generated_code import calls_around_pieces, check_pieces
from swa_compile.options import Options
from swa_compile.passes import OptionError, pipeline


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None,
    wrap: Callable[[InnerCode], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """AOTAutograd, the passes and Inductor on one Dynamo graph.

    Args:
        wrap: is given the code of each graph that Inductor compiles or takes from a cache, and
            returns what AOTAutograd calls in its place.

    Raises:
        OptionError: for an Inductor option that this torch does not know, or freezing.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = {**_for_empty_batches(gm), **config_patches(options, mode, cut=wrap is not None)}
    with nullcontext() if wrap is None else _wrapped(wrap):
        return cast(Callable[..., Any], compile_fx(gm, example_inputs, config_patches=patches))


def config_patches(
    options: Options, mode: str | None = None, *, cut: bool = True
) -> dict[str, Any]:
    """The Inductor configuration of one compilation; torch's own is never assigned to.

    Args:
        cut: somebody captures the pieces, should `options` ask for some.
    """
    from torch._inductor import config, list_mode_options

    if config.freezing:
        raise OptionError(
            "torch._inductor.config.freezing is on: it bakes the mapping into the code, and later "
            "edits of it are not seen; switch it off for models with an index mapping"
        )
    if not config.enable_auto_functionalized_v2:
        raise OptionError(
            "torch._inductor.config.enable_auto_functionalized_v2 is off: version 1 of torch's "
            "wrapper clones whole KV caches and can write wrong rows"
        )
    if config.post_grad_custom_pre_pass is not None:
        raise OptionError(
            "torch._inductor.config.post_grad_custom_pre_pass is set, and the hoist has to stand "
            "there; use post_grad_custom_post_pass for yours, or run swa_compile.passes.pipeline() "
            "inside yours and compile with Inductor itself"
        )
    known = config.get_config_copy()
    # It would put off a translated page table to where it is read, to save its few bytes: then the
    # mapping is read in the middle of the layers.
    patches: dict[str, Any] = {"reorder_for_peak_memory": False}
    patches = {key: value for key, value in patches.items() if key in known}
    if mode is not None:
        patches.update(list_mode_options(mode))
        patches.pop("triton.cudagraphs", None)  # the option `cudagraphs` decides
    patches.update({key.replace("-", "_"): value for key, value in options.inductor.items()})
    unknown = sorted(set(patches) - set(known))
    if unknown:
        raise OptionError(f"torch {torch.__version__} has no Inductor option {', '.join(unknown)}")
    if options.cudagraphs == "inductor":
        patches["triton.cudagraphs"] = True
        patches["graph_partition"] = True
        patches["custom_should_partition_ops"] = list(options.split_ops)
        if options.capture_sizes:
            patches["triton.cudagraph_capture_sizes"] = options.capture_sizes
    else:
        patches["triton.cudagraphs"] = False
        # Whether the code is cut is no part of torch's cache key; these two options are.
        cut = cut and options.cudagraphs in ("piecewise", "auto") and can_wrap()
        patches["graph_partition"] = cut
        patches["custom_should_partition_ops"] = list(options.split_ops) if cut else []
    if patches["graph_partition"]:
        patches.update((key, value) for key, value in _OWN_MEMORY.items() if key in known)
    patches["post_grad_custom_pre_pass"] = pipeline(options)
    return patches


# Inductor has kernels write into slices of what torch.cat returns, and pads tensors by room behind
# them. Where such a tensor is made in one piece of cut code and used in another, it does not hand
# on the memory around it: each piece allocates it anew, and most of it is never written.
_OWN_MEMORY = {"force_pointwise_cat": True, "inplace_padding": False}


def _for_empty_batches(gm: torch.fx.GraphModule) -> dict[str, Any]:
    """Options without which a graph whose sizes are symbols could not be called with none of them.

    Before torch 2.13, kernels that are tiled in two dimensions divide by the size of their grid.
    """
    from torch._inductor.runtime import triton_heuristics

    tiled = getattr(triton_heuristics, "Grid2DWithYZOverflow", None)
    if tiled is None or not any(
        _has_symbols(node) for node in gm.graph.find_nodes(op="placeholder")
    ):
        return {}
    with suppress(Exception):
        grid = tiled({}, "python")
        grid.generate({"XBLOCK": 1, "YBLOCK": 1})
        if "if" in grid.y_grid:
            return {}
    return {"triton.max_tiles": 1}


def _has_symbols(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


@dataclass
class InnerCode:
    """The code that Inductor made of one graph, as AOTAutograd calls it.

    Attributes:
        run: the code: a list of inputs, which it clears, to a sequence of outputs.
        pieces: the functions that the code was cut into.
        replace_pieces: puts others in their place.
        calls: what the code around the pieces calls, see `calls_around_pieces`.
        static, written: places of the inputs at fixed addresses, and of those that it writes.
        inference: no gradients are asked for.
    """

    run: Callable[[list[Any]], Any]
    pieces: list[Callable[[list[Any]], Any]]
    replace_pieces: Callable[[list[Any]], None]
    calls: list[int | str] | None
    static: frozenset[int]
    written: frozenset[int]
    inference: bool


def can_wrap() -> bool:
    """Whether this torch has what captures of our own need of it."""
    from torch._inductor import utils
    from torch._inductor.output_code import CompiledFxGraph

    slot = getattr(utils, "_unstable_customized_partition_wrapper", None)
    return hasattr(slot, "wrapper") and hasattr(CompiledFxGraph, "post_compile")


@contextmanager
def _wrapped(wrap: Callable[[InnerCode], Callable[..., Any]]) -> Iterator[None]:
    """Have `wrap` replace the code of what is compiled or loaded from a cache inside.

    Inductor cuts a graph only where it knows that somebody wraps the pieces. It would let them at
    once, and leave out the rest of what it does to finished code, the alignment of inputs among it;
    so here it finds nobody in `post_compile`. Compilations by Dynamo exclude each other.
    """
    from torch._inductor import utils
    from torch._inductor.output_code import CompiledFxGraph

    slot = utils._unstable_customized_partition_wrapper
    before, post_compile = slot.wrapper, CompiledFxGraph.post_compile

    def finish(graph: Any, *args: Any, **kwargs: Any) -> None:
        slot.wrapper = before
        try:
            pieces, replace_pieces = _own_pieces(graph)
            post_compile(graph, *args, **kwargs)
        finally:
            slot.wrapper = _as_it_is
        known = getattr(graph, "fx_kwargs", {})
        graph.current_callable = wrap(
            InnerCode(
                graph.current_callable,
                pieces,
                replace_pieces,
                calls_around_pieces(getattr(graph, "source_code", "")) if pieces else None,
                frozenset(known.get("static_input_idxs") or ()),
                frozenset(graph.mutated_input_idxs),
                bool(known.get("is_inference")),
            )
        )

    slot.wrapper = _as_it_is
    CompiledFxGraph.post_compile = finish  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        slot.wrapper = before
        CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign]


def _as_it_is(piece: Any, _: Any) -> Any:
    return piece


def _own_pieces(graph: Any) -> tuple[list[Any], Callable[[list[Any]], None]]:
    """The pieces of Inductor's code in a runner of this graph's own, and how to replace them.

    The runner of the generated module would be shared by all graphs that were made of it.
    """
    runner = getattr(graph, "compiled_fn_runner", None)
    if runner is None or graph.current_callable != runner.call:
        return [], lambda _: None
    pieces = list(runner.partitions)
    own = type(runner)(list(pieces))
    graph.compiled_fn_runner, graph.current_callable = own, own.call
    graph.recursively_apply_fns = own.recursively_apply_fns

    def replace(others: list[Any]) -> None:
        own.partitions = others

    return pieces, replace


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `tensor`, on a GPU, that does not keep it from being freed."""
    make_storage = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    make_tensor = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
    if make_storage is None or make_tensor is None:
        return tensor
    whole = tensor.untyped_storage()
    if not whole.nbytes():
        return tensor
    metadata = {
        "nbytes": whole.nbytes(),
        "data_ptr": whole.data_ptr(),
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    storage = make_storage(whole.data_ptr(), tensor.device, whole.nbytes())
    return cast(torch.Tensor, make_tensor(metadata, storage))


def end_failed_capture(device: int, pool: Any) -> None:
    """Tell the allocator that a failed capture into `pool` is over, which torch leaves out."""
    with suppress(Exception):  # it is over already
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def profiler_is_on() -> bool:
    """Whether a profiler of torch's listens to this process."""
    on = getattr(torch.autograd, "_profiler_enabled", None)
    return on is not None and bool(on())


@dataclass(frozen=True)
class Generated:
    """What Inductor made of one graph.

    Attributes:
        code: the source of the module that calls the kernels.
        graph: the FX graph that it was made of, behind all of Inductor's own passes; None where the
            code came from a cache.
    """

    code: str
    graph: torch.fx.GraphModule | None = None


@contextmanager
def captured_code(generated: list[Generated]) -> Iterator[None]:
    """Append to `generated` each graph that is compiled or loaded from a cache inside.

    Raises:
        PiecesError: pieces of the code do not share memory that they should.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    before = getattr(GraphLowering, "save_output_code", None)

    def save(code: str) -> None:
        check_pieces(code)
        graph = getattr(V.graph, "module", None)
        known = isinstance(graph, torch.fx.GraphModule)
        generated.append(Generated(code, graph if known else None))
        if before is not None:  # somebody outside (a test, say) listens too
            before(code)

    GraphLowering.save_output_code = save
    try:
        yield
    finally:
        GraphLowering.save_output_code = before
