"""Marks: what may be marked, what is refused and why, and what the passes read."""

import re

import pytest
import torch

import swa_compile
from swa_compile.ops import mark_store, mark_translation, marks

LIB = torch.library.Library("marks_test", "DEF")
for schema in (
    "good(Tensor loc, int size, Tensor mapping) -> Tensor",
    "plain(Tensor mapping, Tensor loc) -> Tensor",
    "writes(Tensor(a!) mapping, Tensor loc) -> Tensor",
    "view(Tensor(a) mapping, Tensor loc) -> Tensor(a)",
    "pair(Tensor mapping, Tensor loc) -> (Tensor, Tensor)",
    "nothing(Tensor mapping, Tensor loc) -> ()",
    "two_ints(Tensor mapping, Tensor loc, int a, SymInt b) -> Tensor",
    "extra(Tensor mapping, Tensor loc, Tensor other) -> Tensor",
    "maybe(Tensor? mapping, Tensor loc) -> Tensor",
    "keyword(Tensor mapping, Tensor loc, *, int size) -> Tensor",
    "two.a(Tensor mapping, Tensor loc) -> Tensor",
    "two.b(Tensor mapping, Tensor loc, int size) -> Tensor",
    "store(Tensor k, Tensor(a!) cache, Tensor loc) -> ()",
    "store_plain(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor loc) -> ()",
    "store_undeclared(Tensor(a!) k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor loc) -> ()",
    "store_more(Tensor(a!) cache, Tensor(b!) counter, Tensor loc) -> ()",
    "store_loc(Tensor(a!) cache, Tensor(b!) loc) -> ()",
    "store_returns(Tensor(a!) cache, Tensor loc) -> Tensor",
):
    LIB.define(schema)
NS = torch.ops.marks_test


@pytest.fixture(autouse=True)
def unmarked(monkeypatch):
    """Marks made in a test end with it."""
    monkeypatch.setattr(marks, "_MARKS", dict(marks._MARKS))


def test_our_own_operators_are_marked():
    swa = torch.ops.swa
    loc = marks.TranslationMark("swa::translate_loc", mapping=0, loc=1, page_size=None)
    assert marks.translation_mark(swa.translate_loc.default) == loc
    for op in (swa.translate_page_table.default, swa.translate_paged_loc.default):
        assert marks.translation_mark(op) == marks.TranslationMark(op.name(), 0, 1, 2)
    for op in (swa.store_kv.default, swa.store_kv.scalar):
        assert marks.store_mark(op) == marks.StoreMark(op.name(), (0, 1), 4)
    for op in (swa.store_latent.default, swa.store_latent.scalar):
        assert marks.store_mark(op) == marks.StoreMark(op.name(), (0,), 2)


def test_an_operator_is_no_mark_of_the_other_kind():
    swa = torch.ops.swa
    assert marks.store_mark(swa.translate_loc.default) is None
    assert marks.translation_mark(swa.store_kv.default) is None
    assert marks.translation_mark(torch.ops.aten.add.Tensor) is None
    assert marks.translation_mark("swa::translate_loc") is None
    assert marks.translation_mark(len) is None


@pytest.mark.parametrize("op", ["marks_test::good", "marks_test::good.default", NS.good.default])
def test_positions_and_page_size_are_kept(op):
    mark_translation(op, mapping=2, loc=0)
    mark_translation(op, mapping=2, loc=0)  # the same again is fine
    mark = marks.TranslationMark("marks_test::good", mapping=2, loc=0, page_size=1)
    assert marks.translation_mark(NS.good.default) == mark
    op, args = marks.named_call("marks_test::good", "mapping", "loc", 16)
    assert op is NS.good.default
    assert args == ("loc", 16, "mapping")


def test_a_call_by_name_leaves_out_a_page_size_that_is_not_taken():
    assert marks.named_call("swa::translate_loc", "m", "l", 0)[1] == ("m", "l")


def test_an_overload_is_marked_alone():
    mark_translation("marks_test::two.b")
    assert marks.translation_mark(NS.two.b) is not None
    assert marks.translation_mark(NS.two.a) is None
    assert marks.named_call("marks_test::two.b", "m", "l", 4)[0] is NS.two.b


def test_a_store_keeps_positions():
    mark_store("marks_test::store", caches=[1], loc=2)
    assert marks.store_mark(NS.store.default) == marks.StoreMark("marks_test::store", (1,), 2)
    mark_store(NS.store_plain.default)
    assert marks.store_mark(NS.store_plain.default).caches == (0, 1)


def test_marking_otherwise_is_refused():
    mark_translation("marks_test::plain")
    with pytest.raises(ValueError, match=r"^marks_test::plain is marked already"):
        mark_translation("marks_test::plain", mapping=1, loc=0)


REFUSED = [
    ("writes", {}, "argument 'mapping' is written; a translation writes nothing"),
    ("view", {}, "returns a view of an argument"),
    ("pair", {}, "must return one Tensor, returns Tensor, Tensor"),
    ("nothing", {}, "must return one Tensor, returns nothing"),
    ("two_ints", {}, "of the ints 'a', 'b' only one can be the page size"),
    ("extra", {}, "argument 'other' is Tensor; besides mapping and loc"),
    ("maybe", {}, "argument 'mapping' (mapping) must be a Tensor, is Optional[Tensor]"),
    ("keyword", {}, "argument 'size' must not be keyword-only"),
    ("good", {}, "argument 'size' (loc) must be a Tensor, is int"),
    ("plain", {"loc": 2}, "has 2 arguments; loc cannot be 2"),
    ("plain", {"loc": -1}, "has 2 arguments; loc cannot be -1"),
    ("plain", {"loc": 0}, "mapping and loc are both argument 0"),
]


@pytest.mark.parametrize(("name", "positions", "why"), REFUSED)
def test_a_translation_that_its_schema_contradicts_is_refused(name, positions, why):
    with pytest.raises(
        ValueError, match=rf"^mark_translation: marks_test::{name}.*{re.escape(why)}"
    ):
        mark_translation(f"marks_test::{name}", **positions)
    assert marks.translation_mark(getattr(NS, name).default) is None


REFUSED_STORES = [
    ("store_undeclared", {}, "argument 'v_cache' is a cache, but its schema does not declare"),
    ("store_more", {"caches": (0,), "loc": 2}, "argument 'counter' is written but is no cache"),
    ("store_loc", {"caches": (0,), "loc": 1}, "argument 'loc' is loc, but the operator writes it"),
    ("store_returns", {"caches": (0,), "loc": 1}, "must return nothing"),
    ("store_plain", {"caches": ()}, "a store writes at least one cache"),
    ("store_plain", {"loc": 5}, "has 5 arguments; loc cannot be 5"),
]


@pytest.mark.parametrize(("name", "positions", "why"), REFUSED_STORES)
def test_a_store_that_its_schema_contradicts_is_refused(name, positions, why):
    with pytest.raises(ValueError, match=rf"^mark_store: marks_test::{name}.*{re.escape(why)}"):
        mark_store(f"marks_test::{name}", **positions)
    assert marks.store_mark(getattr(NS, name).default) is None


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("marks_test::absent", "there is no operator 'marks_test::absent'"),
        ("absent::absent", "there is no operator 'absent::absent'"),
        ("plain", "an operator is named as 'ns::op', got 'plain'"),
        ("marks_test::two", "has the overloads a, b; name one of them"),
        ("marks_test::two.c", "has the overloads a, b; name one of them"),
    ],
)
def test_an_operator_that_is_not_found_is_refused(op, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        mark_translation(op)


@pytest.mark.parametrize("op", [None, len, torch.ops.aten.add])
def test_what_is_no_operator_name_is_a_type_error(op):
    with pytest.raises(TypeError, match="an operator is named as 'ns::op', got"):
        mark_store(op)


@pytest.mark.parametrize("position", ["loc", 1.0, True, None])
def test_a_position_that_is_no_int_is_a_type_error(position):
    with pytest.raises(TypeError, match="loc is the position of an argument, got"):
        mark_translation("marks_test::plain", loc=position)


def test_description_changes_with_marks():
    before = marks.describe()
    assert any(
        "swa::translate_loc(Tensor mapping, Tensor loc) -> Tensor" in line for line in before
    )
    mark_translation("marks_test::plain")
    assert set(marks.describe()) > set(before)


def test_marks_are_public():
    assert swa_compile.mark_translation is mark_translation
    assert swa_compile.mark_store is mark_store
