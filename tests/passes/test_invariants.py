"""What goes to the prologue beside the translations, and what does not."""

import itertools

import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc

LOC = torch.tensor([90, 41, -1, 77, 30])


def calls(report, op):
    """How often the lowered graph calls `op`, by its dump."""
    import pathlib

    text = pathlib.Path(report.dump, "02-lowered.py").read_text()
    return text.count(f"= torch.ops.{op}")


@pytest.fixture
def dumped(compiled, tmp_path):
    """dumped(fn, *args): compile with a dump of every stage."""

    def run(fn, *args, **options):
        result, (report,) = compiled(fn, *args, dump_dir=str(tmp_path), **options)
        return result, report

    return run


def test_casts_and_page_arithmetic_of_every_layer_are_one(dumped):
    def forward(mapping, loc, x):
        for _ in range(5):
            page = translate_loc(mapping, loc).clamp(min=0) // 4
            x = x * 2 + page.to(torch.int32)
        return x

    mapping = torch.cat([torch.arange(96) % 24, torch.tensor([-1])])
    result, report = dumped(forward, mapping, LOC, torch.zeros(5))

    assert calls(report, "aten._to_copy.default") == 1
    assert calls(report, "aten.clamp.default") == 1
    assert report.invariants_hoisted >= 15
    want = torch.zeros(5)
    for _ in range(5):
        want = want * 2 + torch.where(LOC < 0, 0, mapping[LOC] // 4)
    assert torch.equal(result, want)


def test_sizes_of_which_nothing_is_known_keep_no_invariant_in_the_layers(dumped):
    """Compared as expressions: a cast is no larger than its operand, whatever the size is."""

    def forward(mapping, loc, x):
        for _ in range(5):
            page = translate_loc(mapping, loc).clamp(min=0) // 4
            x = x * 2 + page.to(torch.int32)
        return x

    mapping = torch.cat([torch.arange(96) % 24, torch.tensor([-1])])
    loc, x = LOC.clone(), torch.zeros(5)
    swa_compile.mark_sizes(loc, x)
    result, report = dumped(forward, mapping, loc, x)

    assert report.values[0].shape[0] not in (5, "5")  # unbacked
    assert calls(report, "aten._to_copy.default") == 1
    assert calls(report, "aten.clamp.default") == 1
    want = torch.zeros(5)
    for _ in range(5):
        want = want * 2 + torch.where(LOC < 0, 0, mapping[LOC] // 4)
    assert torch.equal(result, want)


def test_rope_of_every_layer_is_computed_once_per_base(dumped):
    def rope(x, positions, theta):
        frequency = theta ** -(torch.arange(4, dtype=torch.float32) / 4)
        angle = positions[:, None].float() * frequency
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(x, positions):
        for layer in range(6):
            x = rope(x, positions, (1e4, 1e6)[layer % 2])
        return x

    x, positions = torch.randn(5, 8), torch.tensor([3, 1, 4, 1, 5])
    result, report = dumped(forward, x, positions)

    assert torch.equal(result, forward(x, positions))
    assert calls(report, "aten.cos.default") == calls(report, "aten.sin.default") == 2


def test_rows_gathered_from_a_float_table_are_gathered_once(dumped):
    def forward(x, table, positions):
        for _ in range(4):
            x = x * table[positions] + 1
        return x

    x, table, positions = torch.randn(5, 8), torch.randn(64, 8), torch.tensor([3, 1, 4, 1, 5])
    result, report = dumped(forward, x, table, positions)

    assert torch.equal(result, forward(x, table, positions))
    assert calls(report, "aten.index.Tensor") == 1


def test_a_table_written_in_the_forward_is_read_where_it_stands(dumped):
    def forward(x, table, positions):
        x = x * table[positions]
        table.add_(1)
        return x * table[positions]

    x, positions = torch.randn(5, 8), torch.tensor([3, 1, 4, 1, 5])
    table, again = torch.ones(64, 8), torch.ones(64, 8)
    result, report = dumped(forward, x, table, positions)

    assert torch.equal(result, forward(x, again, positions))
    assert calls(report, "aten.index.Tensor") == 2


def test_a_float_value_that_stands_once_is_left_to_be_fused(dumped):
    def forward(x, positions):
        return x * positions[:, None].float().cos()

    _, report = dumped(forward, torch.randn(5, 8), torch.arange(5))
    assert report.invariants_hoisted == 0


def test_a_mask_larger_than_what_it_is_made_of_stays_in_the_layers(dumped):
    def forward(x, positions, keys):
        for _ in range(3):
            x = x.masked_fill(positions[:, None] < keys[None, :], 0.0) + 1
        return x

    positions, keys = torch.arange(64), torch.arange(512)
    x = torch.randn(64, 512)
    result, report = dumped(forward, x, positions, keys)
    assert torch.equal(result, forward(x, positions, keys))
    assert calls(report, "aten.lt.Tensor") == 3


def test_plain_gathers_and_indexed_stores_of_unmarked_code_profit(dumped, make_mapping, oracle):
    """A model without any op of ours: the gather through the mapping is one, at the start."""
    mapping = make_mapping()
    caches = [torch.zeros(24, 2, 4) for _ in range(5)]
    k = torch.randn(5, 2, 4)
    loc = torch.tensor([90, 41, 12, 77, 30])

    def forward(mapping, loc, k):
        for cache in caches:
            k = k + 1
            cache[mapping[loc]] = k

    _, report = dumped(forward, mapping, loc, k)

    assert report.translations_found == 0  # no marked call
    assert report.invariants_hoisted == 5
    assert calls(report, "aten.index.Tensor") == 1
    for i, cache in enumerate(caches):
        want = oracle.store(torch.zeros(24, 2, 4), oracle.translate(mapping, loc), k + i + 1)
        assert torch.allclose(cache[1:], torch.from_numpy(want)[1:])


def test_positions_advanced_in_the_forward_are_not_moved_across_the_write(dumped):
    def forward(x, seq_lens):
        before = x * (seq_lens + 1)
        seq_lens.add_(1)
        return before, x * (seq_lens + 1)

    x, seq_lens, again = torch.randn(3), torch.tensor([4, 5, 6]), torch.tensor([4, 5, 6])
    result, _ = dumped(forward, x, seq_lens)
    for got, want in zip(result, forward(x, again), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(seq_lens, again)


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_merged_index_outputs_do_not_alias(engine, dumped):
    def forward(loc):
        return loc + 1, loc + 1, (loc + 1)[1:]

    (a, b, c), _ = dumped(forward, LOC, engine=engine)
    a[:] = 1000
    assert b.tolist() == (LOC + 1).tolist() and c.tolist() == (LOC + 1)[1:].tolist()
    b[:] = 2000
    assert c.tolist() == (LOC + 1)[1:].tolist()


def test_switched_off_only_translations_move(dumped, make_mapping, make_caches):
    caches = make_caches(3)
    k = torch.randn(5, 2, 4)

    def forward(mapping, loc, k):
        for cache in caches:
            store_kv(*cache, k, k, translate_loc(mapping, loc))

    _, report = dumped(forward, make_mapping(), LOC, k, hoist_invariants=False)
    assert report.invariants_hoisted == 0
    assert report.translation_nodes == 1 and report.stores_lowered == 3


@pytest.mark.parametrize("lower", [True, False])
def test_options_do_not_change_rows(compiled, make_mapping, make_caches, lower):
    k = torch.randn(5, 2, 4)
    rows = []
    for hoist in (True, False):
        caches = make_caches(2)

        def forward(mapping, loc, k, caches=caches):
            for cache in caches:
                store_kv(*cache, k, k * 2, translate_loc(mapping, loc))

        options = {"lower_stores": lower, "hoist_invariants": hoist}
        compiled(forward, make_mapping(), LOC, k, **options)
        rows.append([cache[1:] for cache in itertools.chain(*caches)])
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_copies_of_an_index_input_stay_copies(engine, dumped):
    """Inductor takes a clone away; what is left of it must be neither returned nor written."""
    with torch.library._scoped_library("invariants", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) x) -> ()")
        library.impl("bump", lambda x: (x.add_(1), None)[1], "CPU")
        torch.library.register_fake("invariants::bump", lambda x: None, lib=library)

        def forward(loc, table):
            bumped = loc.clone()
            torch.ops.invariants.bump(bumped)
            return bumped * 2, loc * 3, table.clone(), table[1] + 1

        loc, table = torch.arange(6), torch.arange(32).view(4, 8)
        (bumped, tripled, copy, _), _ = dumped(forward, loc, table, engine=engine)

        assert loc.tolist() == list(range(6))
        assert bumped.tolist() == [2 * (i + 1) for i in range(6)]
        assert tripled.tolist() == [3 * i for i in range(6)]
        copy[:] = -5
        assert table.tolist() == torch.arange(32).view(4, 8).tolist()
