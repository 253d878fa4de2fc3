"""Source lines in the report of a graph out of the compile cache are those of this trace."""

import pytest
import torch

import swa_compile
from swa_compile.ops import translate_loc
from swa_compile.passes import GraphReport, Refusal
from swa_compile.passes.report import Value
from swa_compile.sources import with_sources

pytestmark = pytest.mark.inductor

MAPPING = torch.arange(8)
FORWARD = """
def forward(mapping, loc, x):
    a = translate_loc(mapping, loc)
    b = translate_loc(mapping, (x * 3).to(torch.int64))
    mapping.index_fill_(0, loc, 0)
    return a + b + translate_loc(mapping, loc)
"""
UNUSED = FORWARD.replace(
    "    mapping.index", "    translate_loc(mapping, loc + 1)\n    mapping.index"
)


def report_of(source, file):
    """The report of `source`, as code of `file`, compiled in another process's cache."""
    torch._dynamo.reset()
    scope = {"torch": torch, "translate_loc": translate_loc}
    exec(compile(source, file, "exec"), scope)
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(scope["forward"], backend="swa", fullgraph=True)(
            MAPPING.clone(), torch.tensor([1, 2]), torch.ones(2)
        )
    torch._dynamo.reset()
    return reports[-1]


@pytest.fixture
def cache():
    with torch._inductor.utils.fresh_cache():
        yield


def lines(report):
    return [value.source for value in report.values], [refusal.source for refusal in report.refused]


def test_lines_are_those_of_the_file_that_was_compiled_now(cache):
    cold = report_of(FORWARD, "engine/old.py")
    assert lines(cold)[0] == ["engine/old.py:3", "engine/old.py:4", "engine/old.py:6"]
    warm = report_of("\n\n\n" + FORWARD, "engine/new.py")
    assert (cold.from_cache, warm.from_cache) == (False, True)
    assert lines(warm)[0] == ["engine/new.py:6", "engine/new.py:7", "engine/new.py:9"]
    assert lines(warm)[1] == lines(warm)[0]  # all three are refused, for the mapping is written
    assert [r.code for r in warm.refused] == [r.code for r in cold.refused]
    assert str(warm).count("engine/old.py") == 0


def test_no_line_is_told_where_calls_cannot_be_matched(cache):
    """A call without users is in one graph and not in the other."""
    cold, warm = report_of(UNUSED, "engine/old.py"), report_of(UNUSED, "engine/new.py")
    assert warm.from_cache and all(lines(cold)[0])
    assert not any(line for part in lines(warm) for line in part)


def test_no_line_is_told_of_a_call_in_a_body():
    report = GraphReport(
        translations_found=2,
        values=[Value("m", "a", (), "int64", 1, "old.py:1", call=1), Value("m", "b", (), "", 1)],
        refused=[Refusal("IN_SUBGRAPH", "", "b", "old.py:2")],
    )
    assert lines(with_sources(report, ["new.py:1", "new.py:2"])) == (["new.py:2", ""], [""])
