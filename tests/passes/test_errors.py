"""Bad input to compiled forwards: a clear error, and no cache row changed."""

import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc, translate_page_table, translate_paged_loc

GOOD = torch.tensor([90, 41, -1, 77, 30])
ENGINES = ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)]


def rows(n):
    return torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def forward_over():
    """forward_over(caches): two layers that store through the mapping, one that does not."""

    def make(caches):
        def forward(mapping, loc, k):
            store_kv(*caches[0], k, k, loc % 24)
            for cache in caches[1:]:
                store_kv(*cache, k, k, translate_loc(mapping, loc))

        return forward

    return make


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.tensor([1, 97, 2, 3, 4]), ["translate_loc", "'loc'", "97", "position 1"]),
        (torch.tensor([1, 2, 3, 4, -2]), ["translate_loc", "'loc'", "-2", "position 4"]),
    ],
    ids=["past the end", "below -1"],
)
def test_ids_that_no_pool_has_stop_the_forward_before_any_write(
    engine, bad, words, make_mapping, make_caches, forward_over
):
    caches, before = make_caches(3), make_caches(3)
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(forward_over(caches), backend=engine, dynamic=False)
        with pytest.raises(ValueError, match="translate_loc") as caught:
            call(make_mapping(), bad, rows(5))
    assert all(word in str(caught.value) for word in words), caught.value
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0], old[0]) and torch.equal(cache[1], old[1])


class Layers(torch.nn.Module):
    """Three layers, of which the third forgets to translate."""

    class Layer(torch.nn.Module):
        def __init__(self, caches, translates):
            super().__init__()
            self.caches, self.translates = caches, translates

        def forward(self, mapping, loc, k):
            store_kv(*self.caches, k, k, translate_loc(mapping, loc) if self.translates else loc)

    def __init__(self, caches):
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Layer(pair, i != 2) for i, pair in enumerate(caches))

    def forward(self, mapping, loc, k):
        for layer in self.layers:
            layer(mapping, loc, k)


def test_the_error_of_a_store_that_nobody_translated_names_the_layer(
    compiled, make_mapping, make_caches, tmp_path
):
    caches, before = make_caches(3), make_caches(3)
    words = (
        r"store_kv: argument 'loc' \(store 3 of 3 in this graph, layers\.2, .*test_errors.py:\d+"
    )
    with pytest.raises(ValueError, match=words):
        compiled(Layers(caches), make_mapping(), GOOD.abs(), rows(5), dump_dir=str(tmp_path))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0], old[0]) and torch.equal(cache[1], old[1])
    (lowered,) = tmp_path.glob("*/*/02-lowered.py")
    # One check of what is translated, one of what layers 0 and 1 store at, and one for layer 2.
    assert lowered.read_text().count("= torch.ops.swa.check_ids") == 3


@pytest.mark.parametrize("sizes", ["static", "symbolic"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_slot_past_the_smaller_of_two_caches_writes_neither(engine, sizes, compiled):
    """K has the row and V has not: checked apart, K would be written before V is looked at."""
    caches = rows(16), rows(12)
    before = [cache.clone() for cache in caches]

    def forward(k_cache, v_cache, loc, k):
        store_kv(k_cache, v_cache, k, k, loc)

    options = {"engine": engine, "dynamic": sizes == "symbolic"}
    _, (report,) = compiled(forward, *caches, torch.tensor([11, 3]), rows(2), **options)
    assert report.stores_lowered == 1
    for cache, old in zip(caches, before, strict=True):
        old[torch.tensor([11, 3])] = rows(2)
        assert torch.equal(cache, old)
    with pytest.raises(ValueError, match=r"'loc'.*13"):
        compiled(forward, *caches, torch.tensor([5, 13]), rows(2), **options)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slot_past_the_cache_stops_the_forward_before_any_write(
    engine, make_caches, forward_over
):
    """The mapping itself names a row that the SWA pool does not have."""
    caches, before = make_caches(3), make_caches(3)
    mapping = torch.cat([torch.full((96,), 24), torch.tensor([-1])])
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(ValueError, match=r"store_kv: argument 'loc' .*holds 24"):
        torch.compile(forward_over(caches), backend=engine)(mapping, GOOD, rows(5))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0], old[0]) and torch.equal(cache[1], old[1])


def message(caught):
    """The whole chain of an exception, as text: Dynamo wraps what an op raises."""
    parts, error = [], caught.value
    while error is not None and len(parts) < 10:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


@pytest.mark.parametrize("dynamic", [None, True])
def test_loc_and_k_of_different_length_are_refused_with_both_sizes(
    dynamic, compiled, make_mapping, make_caches, forward_over
):
    caches, before = make_caches(3), make_caches(3)
    with pytest.raises(Exception, match=r".") as caught:
        compiled(forward_over(caches), make_mapping(), GOOD, rows(4), dynamic=dynamic)
    assert "store_kv" in message(caught) and "loc" in message(caught)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0], old[0])


def test_float_ids_are_refused_by_name(compiled, make_mapping, make_caches, forward_over):
    with pytest.raises(Exception, match=r".") as caught:
        compiled(forward_over(make_caches(2)), make_mapping(), GOOD.float(), rows(5))
    assert "must be int32 or int64, got float32" in message(caught)


def test_page_size_0_is_refused(compiled, make_mapping):
    def forward(mapping, table):
        return translate_page_table(mapping, table, 0)

    with pytest.raises(Exception, match=r".") as caught:
        compiled(forward, make_mapping(), GOOD)
    assert "page_size" in message(caught) and "at least 1" in message(caught)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hoist": True}, ["unknown option 'hoist'", "cudagraphs", "dump_dir", "inductor"]),
        ({"inductor": {"freezing": True}}, ["freezing", "mapping"]),
        ({"inductor": {"enable_auto_functionalized_v2": False}}, ["version 1"]),
        ({"inductor": {"post_grad_custom_pre_pass": print}}, ["post_grad_custom_post_pass"]),
        ({"cudagraphs": "sometimes"}, ["'sometimes'", "piecewise", "auto"]),
        ({"strict": "yes"}, ["strict", "'yes'"]),
        ({"capture_sizes": [8, -1]}, ["capture_sizes", "-1"]),
        ({"capture_sizes": 8}, ["capture_sizes", "list"]),
        ({"capture_sizes": [8], "cudagraphs": "off"}, ["capture_sizes", "'off'"]),
        ({"split_ops": ("paged_attention",)}, ["split_ops", "'paged_attention'"]),
        ({"inductor": 3}, ["inductor", "mapping"]),
        ({"dump_dir": 5}, ["dump_dir", "path", "5"]),
    ],
)
def test_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(swa_compile.OptionError) as caught:
        swa_compile.backend(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_option_that_this_inductor_does_not_know_is_refused_by_name(compiled, make_mapping):
    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    with pytest.raises(Exception, match="no Inductor option no_such_thing"):
        compiled(forward, make_mapping(), GOOD, engine="swa", inductor={"no_such_thing": 1})


@pytest.mark.parametrize("engine", ["swa_eager", "swa"])
def test_sizes_that_nothing_will_capture_are_an_error_in_strict_mode(
    engine, compiled, make_mapping
):
    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    options = {"engine": engine, "capture_sizes": [5]}
    with pytest.raises(Exception, match=r"CAPTURE_SKIPPED.*\(5,\).*strict"):
        compiled(forward, make_mapping(), GOOD, strict=True, **options)
    if engine == "swa_eager":
        with pytest.warns(UserWarning, match="CAPTURE_SKIPPED"):
            compiled(forward, make_mapping(), GOOD, **options)


def test_a_pass_of_the_users_own_where_the_hoist_stands_is_refused(compiled, make_mapping):
    """Set in torch's own configuration, it would be dropped without a word."""

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    config = torch._inductor.config.patch(post_grad_custom_pre_pass=swa_compile.passes.pipeline())
    with config, pytest.raises(Exception, match="post_grad_custom_post_pass for yours"):
        compiled(forward, make_mapping(), GOOD, engine="swa")


def test_freezing_switched_on_in_torchs_own_config_is_refused(compiled, make_mapping):
    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    with (
        torch._inductor.config.patch(freezing=True),
        pytest.raises(Exception, match=r"freezing is on.*mapping"),
    ):
        compiled(forward, make_mapping(), GOOD, engine="swa")


@pytest.mark.parametrize(
    ("forward", "bad"),
    [
        (lambda m, x, buf: translate_loc(m, x) + 1, 97),
        (lambda m, x, buf: translate_loc(m, x) + 1, -2),
        (lambda m, x, buf: translate_page_table(m, x, 16) + 1, -5),
        (lambda m, x, buf: translate_page_table(m, x, 16) + 1, 7),
        (lambda m, x, buf: translate_paged_loc(m[:6].clone(), x, 16) + 1, -5),
        (
            lambda m, x, buf: store_kv(
                buf[:8], buf[8:], m[:1, None, None].expand(1, 2, 4) * 1.0, buf[8:9] * 2, x
            ),
            9,
        ),
        (
            lambda m, x, buf: store_kv(
                buf[:8], buf[8:], m[:1, None, None].expand(1, 2, 4) * 1.0, buf[8:9] * 2, x
            ),
            -2,
        ),
    ],
)
def test_the_form_for_gpus_sends_bad_ids_past_the_end(
    forward, bad, compiled, make_mapping, monkeypatch
):
    """There the bounds check of the kernel has to stop them; here indexing does, on the CPU."""
    monkeypatch.setattr("swa_compile.passes.lower.checked_on_the_host", lambda ids: False)
    buf = torch.randn(16, 2, 4)
    before = buf.clone()
    compiled(forward, make_mapping(), torch.tensor([3]), buf.clone())
    with pytest.raises(IndexError):
        compiled(forward, make_mapping(), torch.tensor([bad]), buf)
    assert torch.equal(buf, before)


def test_the_size_of_a_computed_tensor_pulls_nothing_up(compiled, make_mapping):
    """Random numbers are drawn in the order of the model, and the loc is refused."""
    mapping = make_mapping()

    def forward(mapping, loc, x):
        noise = torch.rand_like(x)
        count = (torch.rand(5) > 0.5).nonzero().shape[0]
        return noise, translate_loc(mapping, loc[:count])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.manual_seed(3)
        want = forward(mapping, GOOD, torch.ones(4))
        torch._dynamo.reset()
        call = torch.compile(forward, backend="swa_eager", fullgraph=True)
        call(mapping, GOOD, torch.ones(4))
        torch.manual_seed(3)
        got = call(mapping, GOOD, torch.ones(4))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("on_host", [True, False], ids=["CPU form", "GPU form"])
@pytest.mark.parametrize("page", [None, 4])
def test_translations_of_transposed_ids_are_contiguous(
    on_host, page, compiled, make_mapping, monkeypatch
):
    """As those of the operators are: a view that needs it (or a stride check) relies on that."""
    monkeypatch.setattr("swa_compile.passes.lower.checked_on_the_host", lambda ids: on_host)
    mapping, ids = make_mapping(), torch.arange(12).view(3, 4).t()

    def forward(mapping, ids):
        slots = (
            translate_loc(mapping, ids)
            if page is None
            else translate_page_table(mapping, ids, page)
        )
        return slots, slots.view(12) + 1

    (slots, flat), (report,) = compiled(forward, mapping, ids)
    assert report.translation_nodes == 1
    want = mapping[ids] if page is None else mapping[ids * page] // page
    assert torch.equal(slots, want) and slots.is_contiguous()
    assert torch.equal(flat, want.flatten() + 1)
