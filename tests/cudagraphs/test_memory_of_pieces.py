"""Tensors that Inductor would put together in memory of their own, across cuts of the code."""

import pytest
import torch

import swa_compile
from swa_compile import generated_code
from swa_compile.generated_code import PiecesError, check_pieces
from swa_compile.inductor import config_patches
from swa_compile.ops import paged_attention
from swa_compile.options import Options

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM


def layers(q, k_cache, v_cache, table, lens, cu, w):
    """The product of each layer, put together behind the last."""
    outputs = []
    for _ in range(3):
        out = paged_attention(q, k_cache, v_cache, table, lens, cu)
        outputs.append(out.flatten(1) @ w)
        q = q + outputs[-1].cos().view(q.shape)
    return torch.cat(outputs, 1)


def arguments(n):
    g = torch.Generator().manual_seed(n)
    caches = [torch.randn(64, HEADS, DIM, generator=g) for _ in "kv"]
    table = torch.randint(1, 64, (n, 8), generator=g).int()
    lens, cu = torch.randint(1, 9, (n,), generator=g).int(), torch.arange(n + 1).int()
    w = torch.randn(WIDTH, WIDTH, generator=g) / 4
    return [torch.randn(n, HEADS, DIM, generator=g), *caches, table, lens, cu, w]


def agree(options):
    compiled = torch.compile(layers, backend="swa", options=options)
    with torch.no_grad(), swa_compile.collect() as reports:
        for n in (3, 5, 3, 5, 3):
            args = arguments(n)
            swa_compile.mark_sizes(args[0], *args[3:6])
            torch.testing.assert_close(compiled(*args), layers(*args), rtol=1e-4, atol=1e-4)
    return reports


@pytest.mark.inductor
def test_what_layers_give_is_put_together_behind_the_cuts(on_cpu):
    """Drafts of several steps are stacked so, and hidden states for a draft model concatenated."""
    (report,) = agree({"cudagraphs": "piecewise"})
    assert report.partitions == 3 and report.captures.replays == 3


@pytest.mark.inductor
def test_code_whose_pieces_lose_what_others_wrote_is_an_error(on_cpu, monkeypatch):
    """The option that prevents it could be renamed, or fail."""
    monkeypatch.setattr("swa_compile.inductor._OWN_MEMORY", {})
    with pytest.raises(Exception, match=r"makes buf\d+ in partition_\d and again") as caught:
        agree({"cudagraphs": "piecewise"})
    causes = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(cause, PiecesError) for cause in causes)
    # With the check off, rows are wrong: it is the check that stands between.
    monkeypatch.setattr("swa_compile.inductor.check_pieces", lambda code: None)
    torch._dynamo.reset()
    with pytest.raises(AssertionError):
        agree({"cudagraphs": "piecewise"})
    assert generated_code.check_pieces is check_pieces


@pytest.mark.parametrize("mode", ["piecewise", "auto", "inductor"])
def test_the_users_option_does_not_bring_it_back(mode):
    options = Options.of({"cudagraphs": mode, "inductor": {"force_pointwise_cat": False}})
    assert config_patches(options)["force_pointwise_cat"] is True
    assert config_patches(options)["inplace_padding"] is False


@pytest.mark.parametrize("mode", ["off", "full"])
def test_code_that_is_not_cut_has_inductors_own_choice(mode):
    assert "force_pointwise_cat" not in config_patches(Options.of({"cudagraphs": mode}))


@pytest.mark.inductor
def test_where_nothing_is_captured_inductor_compiles_as_it_does_alone():
    """On the CPU: its C++ of a concatenation of masks that is kept whole would not compile."""

    def forward(x):
        mask = torch.ones_like(x, dtype=torch.bool).tril()
        return torch.cat([mask[1:], mask[:1]])

    torch._dynamo.reset()
    x = torch.ones(5, 16)
    assert torch.equal(torch.compile(forward, backend="swa")(x), forward(x))
    assert "force_pointwise_cat" not in config_patches(Options(), cut=False)
