"""Context parallel: global locations for stores, local ones for queries, two values in one node."""

import itertools

import pytest
import torch

from swa_compile.models.context_parallel import split_context

from .launch import launch_once
from .oracle import close, same_rows, whole_run
from .programs import steps

RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    dumps = tmp_path_factory.mktemp("context")
    return launch_once(tmp_path_factory, "context_parallel", RANKS, dump_dir=str(dumps))


def test_every_rank_holds_the_rows_of_all_tokens(results):
    _, rows, _ = whole_run()
    for got in results:
        same_rows(got["rows"], rows)


def test_rank_0_ends_every_request_with_the_logits_of_the_whole_model(results):
    logits, _, _ = whole_run()
    close([step[1::2] for step in results[0]["logits"]], logits)


def test_ranks_share_the_tokens_evenly(results):
    for got in results:
        # Each request adds at most one token per part to what an even cut would give.
        assert all(local <= -(-tokens // RANKS) + 2 * 3 for tokens, local in got["sizes"])
        assert got["sizes"][0][1] < got["sizes"][0][0]


def test_global_locations_and_local_tables_are_two_values_of_one_node(results):
    for got in results:
        (report,) = got["reports"]
        assert (report["translations_found"], report["translation_nodes"]) == (4, 1)
        uses = {value["loc"]: value["uses"] for value in report["values"]}
        assert uses == {"shard.out_cache_loc": 2, "shard.batch.page_table": 2}
        (stages,) = got["collectives"]
        wanted = ["all_gather_into_tensor"] * (2 * 3)
        assert all(found == wanted for found in stages.values()), stages


def test_local_locations_are_never_merged_with_the_global_ones(results):
    """Row A13, with the ranks that its scenario only imagines."""
    for rank, result in enumerate(results):
        got = result["own rows"]
        report = got["report"]
        assert (report["translations_found"], report["translation_nodes"]) == (4, 1)
        shapes = {value["loc"]: value["shape"] for value in report["values"]}
        assert shapes == {"loc": [3 * RANKS], "local_loc": [3]}
        for i, (k_cache, v_cache) in enumerate(got["caches"]):
            want = torch.zeros(21, 2, 4)
            for slot, row in zip(got["loc"].tolist(), got["k"], strict=True):
                want[got["mapping"][slot]] = row + i
            assert torch.equal(k_cache, want)
            assert torch.equal(v_cache, -want)
            assert torch.equal(got["seen"][i], got["k"][3 * rank : 3 * rank + 3] + i)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_shards_of_all_ranks_hold_each_token_once(ranks):
    _, pool = steps.whole_model()
    requests = [pool.open() for _ in range(3)]
    pool.batch({requests[0]: range(5)})
    batch = pool.batch({requests[0]: range(20, 31), requests[1]: [7], requests[2]: range(40, 45)})
    offsets = batch.cu_seqlens_q.tolist()
    shards = [split_context(batch, offsets, rank, ranks) for rank in range(ranks)]

    found = []
    for shard in shards:
        shard.batch.validate()
        assert torch.equal(shard.out_cache_loc, shards[0].out_cache_loc)
        ends = shard.batch.cu_seqlens_q.tolist()
        for row, (first, last) in enumerate(itertools.pairwise(ends)):
            for i in range(first, last):  # query i of a row stands at seq_len - n_q + i
                position = int(shard.batch.seq_lens[row]) - (last - first) + i - first
                assert int(shard.batch.positions[i]) == position
                slot = int(shard.batch.page_table[row, position])
                assert slot == int(shard.batch.out_cache_loc[i])
                found.append((slot, int(shard.batch.input_ids[i])))
        assert not shard.batch.out_cache_loc[ends[-1] :].any()  # padding: the sink
    assert sorted(found) == sorted(
        zip(batch.out_cache_loc.tolist(), batch.input_ids.tolist(), strict=True)
    )
    gathered = torch.cat([shard.batch.out_cache_loc for shard in shards])
    assert torch.equal(gathered, shards[0].out_cache_loc)
