"""What ranks say to each other ahead of a forward: the bucket, and whether they run the same."""

from dataclasses import replace

import pytest

import swa_compile
from swa_compile.distributed import verify_ranks
from swa_compile.distributed.identity import differences, identity, ranks_text
from swa_compile.passes import GraphReport
from swa_compile.passes.report import Value

from .launch import launch_once


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_once(tmp_path_factory, "agreement", 4)


def each(results, kind, name):
    return [got[kind][name] for got in results]


def test_ranks_of_unlike_sizes_agree_on_the_least_bucket_that_holds_all(results):
    """Row B56."""
    for bucket in each(results, "buckets", "unlike"):
        assert (bucket.tokens, bucket.requests, bucket.idle) == (16, 4, False)
        assert (bucket.rank_tokens, bucket.rank_requests) == ((3, 9, 0, 1), (1, 2, 0, 1))


def test_ranks_know_when_all_of_them_are_idle(results):
    assert all(bucket.idle for bucket in each(results, "buckets", "all idle"))
    assert {bucket.tokens for bucket in each(results, "buckets", "all idle")} == {4}


def test_requests_can_have_sizes_of_their_own(results):
    for bucket in each(results, "buckets", "own sizes for requests"):
        assert (bucket.tokens, bucket.requests) == (8, 3)


def test_a_subgroup_agrees_by_itself(results):
    found = [(bucket.tokens, bucket.rank_tokens) for bucket in each(results, "buckets", "half")]
    assert found == [(8, (2, 5))] * 2 + [(16, (8, 11))] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too many", ("rank 2 has 17 tokens", "largest size is 16")),
        ("negative", ("rank 3 gave -1 tokens",)),
        ("other sizes", ("rank 0 and rank 1 were given different sizes",)),
    ],
)
def test_every_rank_gets_the_error_that_names_the_rank_at_fault(results, name, words):
    for kind, message, _ in each(results, "buckets", name):
        assert kind == "ValueError"
        for word in words:
            assert word in message
    assert {bucket.tokens for bucket in each(results, "buckets", "afterwards")} == {4}


def test_ranks_that_compiled_alike_share_an_identity(results):
    (shared,) = set(each(results, "identities", "same"))
    assert len(shared) == 64
    assert set(each(results, "identities", "afterwards")) != {shared}


@pytest.mark.parametrize(
    ("name", "differs", "where"),
    [
        ("option", "options.lower_stores", {"True": [0, 1, 2], "False": [3]}),
        ("inductor", "options.inductor.max_autotune", {"nothing": [0, 1, 3], "True": [2]}),
        ("report", "graph 0.translations_found", {"1": [0, 3], "2": [1, 2]}),
        ("graphs", "graphs", {"0": [0], "1": [1, 2, 3]}),
        ("version", "versions.python", {"3.10": [0, 1], "3.11": [2, 3]}),
    ],
)
def test_a_mismatch_names_the_ranks_and_what_differs(results, name, differs, where):
    for kind, message, found in each(results, "identities", name):
        assert kind == "RankMismatch"
        assert found[differs] == where
        assert f"  {differs}: " in message
    messages = {message for _, message, _ in each(results, "identities", name)}
    assert len(messages) == 1  # on every rank the same


def test_the_message_gives_each_value_with_its_ranks(results):
    _, message, _ = results[2]["identities"]["option"]
    assert message.splitlines() == [
        "ranks differ in 1 thing:",
        "  options.lower_stores: True on ranks 0-2; False on rank 3",
    ]


def test_groups_that_are_alike_inside_may_differ(results):
    found = each(results, "identities", "half")
    assert found[0] == found[1] != found[2] == found[3]


def test_the_package_takes_verify_ranks_from_below_only_when_asked():
    assert "verify_ranks" in swa_compile.__all__ and "verify_ranks" not in vars(swa_compile)
    assert swa_compile.verify_ranks is verify_ranks
    with pytest.raises(AttributeError, match="verify_rank"):
        swa_compile.verify_rank  # noqa: B018


def test_ranks_are_written_as_ranges():
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([7, 0, 2, 3, 4]) == "ranks 0, 2-4, 7"


def test_where_a_process_got_or_put_something_is_no_difference():
    value = Value("mapping", "loc", (4,), "int64", 2, "/here/model.py:5", call=0)
    one = GraphReport(translations_found=2, dump="/here", values=[value])
    unknown = [replace(value, source="", call=-1)]
    other = GraphReport(translations_found=2, dump="/there", values=unknown, from_cache=True)
    assert identity([one], {"dump_dir": "/a"}) == identity([other], {"dump_dir": "/b"})


def test_graphs_with_unlike_collectives_differ():
    """They would hang, or reduce what the others gather."""
    one, other = (
        identity([GraphReport(collectives=["all_reduce(sum)", second])])
        for second in ("all_reduce(max)", "all_gather_into_tensor(2)")
    )
    found = differences({0: one, 1: other, 2: one})
    assert list(found) == ["graph 0.collectives[1]"]
    assert sorted(found["graph 0.collectives[1]"].values()) == [[0, 2], [1]]


def test_a_field_that_one_rank_lacks_is_a_difference():
    assert differences({0: {"a": "1"}, 1: {"a": "1", "b": "2"}, 5: {"a": "1"}}) == {
        "b": {"nothing": [0, 5], "2": [1]}
    }
