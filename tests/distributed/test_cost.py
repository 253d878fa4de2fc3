"""The plan on paper: its formulas against real forwards, its figures against its formulas."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from swa_compile.distributed import agree_on_bucket, cost, verify_ranks
from swa_compile.kv import LayerSpec
from swa_compile.models.pipeline_parallel import stage_layers
from swa_compile.models.tensor_parallel import shard_specs

from .launch import launch
from .programs import steps
from .programs.traffic import TOKENS

DOCUMENT = Path(__file__).parents[2] / "docs" / "distributed.md"

# The model of the document's tables, in bfloat16.
SPECS = [LayerSpec("full", 8, 64), LayerSpec("swa", 8, 64, window=1024)] * 12
DECODE = cost.Forward(SPECS, tokens=64, requests=64, table_width=4096, d_model=2048)
PREFILL = cost.Forward(SPECS, tokens=8192, requests=4, table_width=4096, d_model=2048)
RANKS = (2, 8, 64, 1024)


def test_forwards_hand_over_what_the_formulas_say(tmp_path):
    """Two ranks, eager, float32: the calls and the bytes of their operands."""
    ranks = 2
    small = cost.Forward(
        steps.CONFIG.layer_specs(), TOKENS, 1, steps.WIDTH, steps.CONFIG.d_model, itemsize=4
    )
    wanted = {
        "tensor": cost.tensor_parallel(small, ranks),
        "data": cost.data_parallel_mlp(small, ranks),
        "context": cost.context_parallel(small, ranks),
    }
    for got in launch("traffic", ranks, tmp_path):
        assert got == {name: (t.launches, t.operand_bytes) for name, t in wanted.items()}


@pytest.mark.parametrize(
    ("call", "module", "size"),
    [
        (lambda: agree_on_bucket(1, 1, (4,)), "buckets", cost.AGREEMENT_BYTES),
        (lambda: verify_ranks(), "identity", cost.IDENTITY_BYTES),
    ],
)
def test_agreement_and_verification_gather_once_and_as_few_bytes_as_said(call, module, size):
    given = []

    def gather_rows(row, group):
        given.append(row.nbytes)
        return torch.stack([row, row])

    where = f"swa_compile.distributed.{module}"
    with (
        mock.patch(f"{where}.gather_rows", gather_rows),
        mock.patch(f"{where}.global_ranks", return_value=[0, 1]),
    ):
        call()
    assert given == [size]


def table_lines():
    """Every line of the document's tables that holds a computed figure."""
    for ranks in RANKS:
        tensor = cost.tensor_parallel(DECODE, ranks)
        data = cost.data_parallel_mlp(DECODE, ranks)
        context = cost.context_parallel(PREFILL, ranks)
        heads = shard_specs(SPECS, ranks)
        caches = cost.cache_bytes(heads, full_tokens=262_144, swa_tokens=65_536)
        sent = (tensor, data, context, cost.agreement(ranks), cost.verification(ranks))
        yield row(ranks, *(traffic.sent_bytes for traffic in sent))
        yield row(ranks, heads[0].kv_heads, caches, cost.translation_bytes(DECODE))
    launches = [t.launches for t in (tensor, data, context, cost.agreement(2))]
    yield row("launches", *launches, cost.verification(2).launches)

    # 1,024 ranks as 8 tensor x 4 pipeline x 32 data.
    own = [SPECS[i] for i in stage_layers(len(SPECS), 0, 4)]
    stage = cost.Forward(own, 64, 64, 4096, 2048)
    tensor = cost.tensor_parallel(stage, 8)
    pipeline = cost.pipeline_parallel(stage, 4)
    yield row("all-reduces of a stage, among 8", tensor.launches, tensor.sent_bytes)
    yield row("hidden states to the next stage", pipeline.launches, pipeline.sent_bytes)
    yield row("the bucket, among all 1,024", 1, cost.agreement(1024).sent_bytes)


def row(*cells):
    return "| " + " | ".join(f"{c:,}" if isinstance(c, int) else c for c in cells) + " |"


def test_the_figures_of_the_document_are_those_of_the_formulas():
    text = DOCUMENT.read_text()
    missing = [line for line in table_lines() if line not in text]
    assert not missing, "\n".join(missing)


def test_translations_cost_nothing_without_sliding_layers_and_the_same_at_every_depth():
    full = cost.Forward(SPECS[::2], 64, 64, 4096, 2048)
    assert cost.translation_bytes(full) == 0
    deeper = cost.Forward(SPECS * 4, 64, 64, 4096, 2048)
    assert cost.translation_bytes(deeper) == cost.translation_bytes(DECODE) > 0
