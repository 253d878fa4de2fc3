"""The rows of the two lists that this suite goes through, and who checks those without a scenario.

A: systems with hybrid KV pools. B: faults that were met in public, each as what has to hold.
"""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

A = {
    "A1": "five store sites on one location, int32 consumers",
    "A2": "full and sliding layers in one forward",
    "A3": "read tables from req_to_token, page sizes 1, 16, 64",
    "A4": "no metadata, current, stale, idle",
    "A5": "data-parallel padding between set-up and use",
    "A6": "static buffers whose contents change between calls",
    "A7": "the stale tail of a padded bucket",
    "A8": "multi-step draft decode with strided locations",
    "A9": "draft-extend without a metadata object",
    "A10": "EAGLE verify with two read tables",
    "A11": "multi-layer EAGLE: several models, one mapping",
    "A12": "frozen-KV MTP: pool and mapping swapped between calls",
    "A13": "context parallelism: global and local locations",
    "A14": "HiSparse: a second mapping over compressed slots",
    "A15": "DSV4 compressor: C4 and C128 slots",
    "A16": "late layers on a subset of rows",
    "A17": "two-batch overlap",
    "A18": "attention narrowed per call",
    "A19": "unified memory pool: page table with tombstones",
    "A20": "every layer slides: identity mapping",
    "A21": "ring pools without a mapping",
    "A22": "encoder-decoder: cross-attention stores",
    "A23": "deterministic extend reads back what it wrote",
    "A24": "chunked local attention",
    "A25": "int32 and int64 index contracts",
    "A26": "breakable graphs: addresses across segments",
}

B = {
    "B01": "a stale padded tail",
    "B02": "int32 and int64 consumers share a gather",
    "B03": "row offsets past 2^31",
    "B05": "46 layers, one translation, counted in the code",
    "B06": "same storage, new contents; a mapping edited or replaced",
    "B07": "a pool without and then with a mapping",
    "B08": "N-d read tables",
    "B09": "a None index on a sliding layer",
    "B10": "fewer locations than rows",
    "B11": "locations and rows of different length",
    "B13": "kinds, heads and dims differ per layer",
    "B16": "no synchronization in steady state",
    "B18": "stage-local layer numbers",
    "B22": "K and V as halves of one allocation",
    "B23": "interleaved views of two dtypes",
    "B24": "undeclared writes; schemas in the cache key; opcheck",
    "B28": "read, store, read again",
    "B29": "operands that no pass owns",
    "B31": "users of a functionalized node that are no getitem",
    "B32": "functionalization version 1",
    "B33": "strides of rows and caches",
    "B34": "declared writes, no analysis",
    "B35": "a real identity; the report on a warm start",
    "B36": "changed split ops on a warm start",
    "B37": "options in the cache key; a moved cache folder",
    "B38": "partitions and an input that a custom op writes",
    "B39": "sizes 4, 8, 4 with distinct data",
    "B40": "addresses of values made in an eager island",
    "B42": "only tensors and sizes cross a cut",
    "B43": "no empty pieces",
    "B44": "skipped captures are reported",
    "B45": "a number on the host that changes",
    "B48": "48 layers of two kinds without a constant per layer",
    "B49": "sizes 8, 2, 1, 0, 64",
    "B51": "a replaced pool",
    "B52": "graph memory is reported",
    "B53": "dumps without depyf",
    "B54": "nothing to hoist",
    "B55": "errors name pass, node, layer, shapes and switch",
    "B56": "ranks agree on a bucket",
    "B57": "no collective during compilation",
    "B58": "a collective whose result is unused",
}

# Tests that check a row without being a scenario, or check more of it.
TESTS = {
    "A2": [
        "scenarios/test_refusals.py::"
        "test_the_error_of_an_untranslated_store_says_which_store_it_is_and_where",
    ],
    "A13": [
        "distributed/test_context_parallel.py::"
        "test_local_locations_are_never_merged_with_the_global_ones",
    ],
    "B03": [
        "scenarios/test_caches.py::test_a_row_past_2_to_the_31_bytes_is_written_at_its_place",
        "ops/test_kernels.py::test_store_offsets_have_64_bits",
    ],
    "B05": [
        "passes/test_pipeline.py::test_46_layers_store_through_one_loc_buffer",
    ],
    "B09": [
        "scenarios/test_refusals.py::"
        "test_a_store_without_locations_is_an_error_that_names_the_argument",
    ],
    "B10": [
        "scenarios/test_refusals.py::"
        "test_fewer_or_more_locations_than_rows_are_refused_with_both_sizes",
    ],
    "B11": [
        "scenarios/test_refusals.py::"
        "test_a_graph_for_all_sizes_still_refuses_a_call_whose_sizes_differ",
    ],
    "B16": [
        "gpu/test_swa_on_gpu.py::test_steady_state_never_synchronizes",
    ],
    "B18": [
        "distributed/test_pipeline_parallel.py::test_stages_write_the_rows_of_their_own_layers",
    ],
    "B22": [
        "passes/test_stores.py::test_inductor_copies_no_cache_and_writes_the_same_rows",
    ],
    "B23": [
        "passes/test_cache_kinds.py::test_one_byte_pool_written_as_two_dtypes_is_a_named_error",
    ],
    "B24": [
        "ops/test_marks.py::test_a_store_that_its_schema_contradicts_is_refused",
        "passes/test_pipeline.py::test_uuid_changes_with_options_and_marks_and_with_nothing_else",
        "ops/test_store.py::test_opcheck",
    ],
    "B31": [
        "scenarios/test_other_ops.py::test_users_of_a_store_that_are_no_getitem_keep_their_rows",
    ],
    "B32": [
        "passes/test_pipeline.py::test_functionalization_version_1_is_refused",
    ],
    "B34": [
        "passes/test_foreign_ops.py::test_a_declared_write_to_the_mapping_makes_a_new_value",
    ],
    "B35": [
        "passes/test_pipeline.py::test_a_second_process_hits_the_cache_and_still_reports",
    ],
    "B36": [
        "scenarios/test_compile_cache.py::test_other_split_ops_miss_the_cache",
    ],
    "B37": [
        "scenarios/test_compile_cache.py::test_a_moved_cache_folder_hits_and_another_option_misses",
    ],
    "B53": [
        "scenarios/test_other_ops.py::test_dumps_are_complete_without_depyf",
    ],
    "B54": [
        "passes/test_hoist.py::test_a_graph_without_translations_is_unchanged_and_says_so",
    ],
    "B55": [
        "scenarios/test_refusals.py::test_an_error_of_a_pass_names_the_cache_and_the_switch",
        "scenarios/test_refusals.py::test_an_error_of_a_pass_names_the_pass_and_the_shape",
    ],
    "B56": [
        "distributed/test_agreement.py::"
        "test_ranks_of_unlike_sizes_agree_on_the_least_bucket_that_holds_all",
        "distributed/test_data_parallel.py::test_four_ranks_agree_pad_run_and_trim_with_one_idle",
    ],
    "B57": [
        "distributed/test_data_parallel.py::"
        "test_a_rank_with_a_warm_compile_cache_and_one_without_do_not_hang",
        "scenarios/test_other_ops.py::test_no_collective_runs_while_a_forward_compiles",
    ],
    "B58": [
        "distributed/test_tensor_parallel.py::"
        "test_functional_collectives_on_four_ranks_keep_rows_and_order",
        "passes/test_collectives.py::"
        "test_every_collective_is_kept_in_order_even_if_nobody_reads_it",
    ],
}

_REPLAY = "needs CUDA graph replay, and so a GPU"
_CUT = "Inductor cuts graphs into partitions for GPUs alone"

# Rows that nothing here can check, with the reason.
REASONS = {
    "A26": _REPLAY,
    "B38": _CUT,
    "B40": _REPLAY,
    "B42": _CUT,
    "B43": _CUT,
    "B44": _REPLAY,
    "B52": _REPLAY,
}


def scenario_rows() -> set[str]:
    """The rows that the scenarios of this folder name, read off their decorators."""
    found: set[str] = set()
    for path in HERE.glob("test_*.py"):
        for function in functions(path):
            for decorator in function.decorator_list:
                called = isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name)
                if called and decorator.func.id == "scenario":
                    found |= {arg.value for arg in decorator.args if isinstance(arg, ast.Constant)}
    return found


def functions(path: Path) -> list[ast.FunctionDef]:
    """The functions at the top level of a file, which is not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def elsewhere() -> list[tuple[str, str, str]]:
    """(row, what it is, who checks it or why nobody does) of each row without a scenario."""
    have = scenario_rows()
    lines = []
    for row, what in (A | B).items():
        if row not in have:
            names = [f"tests/{name}" for name in TESTS.get(row, [])]
            lines.append((row, what, ", ".join(names) or REASONS.get(row, "NOT CHECKED")))
    return lines
