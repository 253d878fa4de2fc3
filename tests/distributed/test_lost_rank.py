"""A rank that is lost: the others get an error in time, and every visible dump is whole."""

import re

from .launch import launch
from .programs.lost_rank import CODE, LOST, whole_files

STAGES = [
    *("00-functional.py", "01-hoisted.py", "02-lowered.py", "captured.py"),
    *("diff-01.txt", "diff-02.txt", "graph.json", "index.html", "op-counts.txt", "report.json"),
]


def lose(tmp_path, ranks, how, seconds):
    dumps = tmp_path / "dumps"
    results = launch(
        "lost_rank",
        ranks,
        tmp_path,
        exits={LOST: CODE},
        how=how,
        dump_dir=str(dumps),
        seconds=seconds,
    )
    for rank, got in enumerate(results):
        if rank != LOST:
            assert got["error"], "the forward went through without a rank"
            assert whole_files(dumps / str(rank)) == (STAGES, [])
    return [got for rank, got in enumerate(results) if rank != LOST], dumps / str(LOST)


def test_a_rank_that_dies_in_a_forward_is_an_error_for_the_others(tmp_path):
    others, dumps = lose(tmp_path, 4, "exit", seconds=30)
    for got in others:
        assert got["seconds"] < 30 + 10
        assert re.search("(closed|reset) by peer", got["error"]), got["error"]
    assert whole_files(dumps) == (STAGES, [])


def test_a_rank_that_stands_still_is_an_error_after_the_groups_timeout(tmp_path):
    ((got,), dumps) = lose(tmp_path, 2, "stall", seconds=4)
    assert "imed out" in got["error"]
    assert 4 <= got["seconds"] < 4 + 20
    assert whole_files(dumps) == (STAGES, [])


def test_a_rank_that_dies_while_it_writes_a_dump_leaves_whole_files(tmp_path):
    _, dumps = lose(tmp_path, 2, "dump", seconds=30)
    names, hidden = whole_files(dumps)
    assert not names  # a folder appears when all of it is there
    assert hidden  # what was being written, under a name that nobody opens
