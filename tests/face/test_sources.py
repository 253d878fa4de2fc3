"""Source lines in the report of a graph out of the compile cache are those of this trace."""

import pytest
import torch

import swa_compile
from swa_compile.ops import translate_loc
from swa_compile.ops.marks import mark_translation
from swa_compile.passes import GraphReport, Refusal, pipeline
from swa_compile.passes.report import Value
from swa_compile.sources import call_sources, with_sources

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
TURNED = """
def forward(mapping, loc, x):
    a = translate_loc(mapping, loc)
    b = translate_loc(mapping, loc + 1)
    y = x + b
    return y, y * a
"""
REGION = """
@torch.compiler.nested_compile_region
def layer(mapping, loc, x):
    return x + translate_loc(mapping, loc)

def forward(mapping, loc, x):
    translate_loc(mapping, loc + 2)
    translate_loc(mapping, loc + 3)
    return layer(mapping, loc, layer(mapping, loc, x)) + translate_loc(mapping, loc + 1)
"""


def report_of(source, file, **how):
    """The report of `source`, as code of `file`, compiled in another process's cache."""
    torch._dynamo.reset()
    scope = {"torch": torch, "translate_loc": translate_loc}
    exec(compile(source, file, "exec"), scope)
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(scope["forward"], fullgraph=True, **(how or {"backend": "swa"}))(
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


def test_lines_are_those_of_the_calls_in_the_order_that_inductor_gives_them(cache):
    """It moves the call that is used last behind the other one."""
    cold, warm = report_of(TURNED, "engine/old.py"), report_of("\n\n" + TURNED, "engine/new.py")
    # How an input is called differs between versions of torch; the sum has the name of its node.
    for report, given, computed in ((cold, "old.py:3", "old.py:4"), (warm, "new.py:5", "new.py:6")):
        told = {value.loc.startswith("add"): value.source for value in report.values}
        assert told == {False: f"engine/{given}", True: f"engine/{computed}"}
    assert warm.from_cache


def test_no_line_is_told_where_calls_cannot_be_matched(cache):
    """A call without users is in one graph and not in the other."""
    cold, warm = report_of(UNUSED, "engine/old.py"), report_of(UNUSED, "engine/new.py")
    assert warm.from_cache and all(lines(cold)[0])
    assert not any(line for part in lines(warm) for line in part)


def test_no_line_is_told_where_some_calls_come_out_of_a_region(cache):
    """Three calls stand outside of it; the passes find three, of which two are the region's."""
    cold, warm = report_of(REGION, "engine/old.py"), report_of(REGION, "engine/new.py")
    assert warm.from_cache and cold.translations_found == 3 and all(lines(cold)[0])
    assert lines(warm) == (["", ""], [])


def test_no_line_is_told_where_a_call_stands_in_a_body():
    report = GraphReport(
        translations_found=2,
        values=[Value("m", "a", (), "int64", 1, call=1), Value("m", "b", (), "", 1)],
        refused=[Refusal("IN_SUBGRAPH", "", "b", "")],
    )
    assert lines(with_sources(report, ["new.py:1", "new.py:2"])) == (["", ""], [""])


def test_stock_inductor_tells_no_line_of_another_process(cache):
    how = {"options": {"post_grad_custom_pre_pass": pipeline()}}
    cold, warm = (report_of(TURNED, f"engine/{age}.py", **how) for age in ("old", "new"))
    assert (cold.from_cache, warm.from_cache) == (False, True)
    assert all(lines(cold)[0]) and lines(warm)[0] == ["", ""]


def test_an_engines_operator_that_is_called_without_its_overload_is_a_translation():
    """Dynamo's graph does not say which overload is meant; the marked one is not the first."""
    found = []

    def look(gm, _):
        found.extend(call_sources(gm))
        return gm

    def forward(mapping, loc):
        return torch.ops.sources_test.ids(mapping, loc)

    with torch.library._scoped_library("sources_test", "DEF") as library:
        library.define("ids(Tensor loc, int n) -> Tensor")
        library.define("ids.through(Tensor mapping, Tensor loc) -> Tensor")
        library.impl("ids.through", torch.take, "CompositeExplicitAutograd")
        mark_translation("sources_test::ids.through")
        torch.compile(forward, backend=look, fullgraph=True)(MAPPING, torch.tensor([1, 2]))
    (line,) = found
    assert line.startswith(f"{__file__}:")
