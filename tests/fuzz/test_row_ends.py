"""Random graphs of one layer that end ahead of attention: stores, and what is given back.

Eager code is the oracle for caches, ids, inputs and outputs. What the outputs share is asked of
what torch makes of the same forward without the passes. Every row program also runs as the Triton
kernel, in the interpreter. A campaign is run as in `test_row_fuzz`.
"""

import os
import random

import pytest
import torch

import swa_compile
from swa_compile.ops import row_program, store_kv, store_latent

CAMPAIGN = int(os.environ.get("SWA_FUZZ_PROGRAMS", "0"))
FIRST = int(os.environ.get("SWA_FUZZ_SEED", "0"))
ROWS = 11
# What makes a cache of [ROWS, 2, 8], and the view of it that a layer is given.
CACHES = {
    "{c}": (ROWS, 2, 8),
    "{c}[1]": (3, ROWS, 2, 8),
    "{c}[2, :]": (ROWS, ROWS, 2, 8),
    "{c}[:, 1]": (ROWS, 2, 2, 8),
    "{c}[:ROWS]": (ROWS + 4, 2, 8),
    "{c}[4:]": (ROWS + 4, 2, 8),
    "{c}.view(ROWS, 2, 8)": (1, ROWS, 2, 8),
    "{c}.transpose(0, 1)": (2, ROWS, 8),
}
# How ids of N tokens lie in what the forward is given.
IDS = {
    "loc": lambda ids: ids,
    "loc[:n]": lambda ids: torch.cat((ids, ids.new_full((3,), 2**40 % ROWS))),
    "loc[:, 1]": lambda ids: torch.stack((ids * 0 - 7, ids), 1),
    "loc[0]": lambda ids: ids[None].clone(),
    "loc.flatten()": lambda ids: ids[:, None].clone(),
    "loc + 1": lambda ids: ids - 1,
    "loc.long()": lambda ids: ids.short(),
    "loc.int()": lambda ids: ids,
    "loc.clone()": lambda ids: ids,
}
ROWS_OF = """x\nz * 2\nx * 3\nx + w\nx.exp()\ny\nx * y\nx - x.amax(-1, keepdim=True)
torch.cat((-x[..., 4:], x[..., :4]), -1)
(x.transpose(0, 1) * 2).transpose(0, 1)
x + c0.flatten()[:16].view(2, 8)""".splitlines()
BETWEEN = """x.add_(1)\nloc.add_(0)\nloc[:1] = 0\nc0.mul_(2)\nz.copy_({a})\n{a}.add_(1)
{a}[:, 0].mul_(2)\ny = y + {a}.sum()\ny = {a} @ {a}.transpose(1, 2) @ y""".splitlines()
ENDS = """{a}\n{a}.flatten(1)\n{a}.reshape(n, 4, 4)\n{a}.transpose(0, 1)\n{a}[:, 0]\n{a}[1:]
{a}[None]\n{a}.sum(0)\n{a}.sum(-1)\n{a} * 2\n{a}.half()\n{a}[:, :1].expand(n, 2, 8)
{a}.mean(-1, keepdim=True)\n{a}.contiguous()\n{a}[..., :4]\nx\ny\nloc\nown\nc0
{a}.flatten(1), {a}\n{a}.flatten(1), {a}[None]""".splitlines()


def source(seed):
    """Text of a forward(x, z, w, loc, *caches), its caches' shapes, and how its ids lie."""
    rng = random.Random(seed)
    lines, shapes, made = ["n = x.shape[0]", "y = x * 1.5"], [], []

    def rows():
        if made and rng.random() < 0.3:
            return rng.choice(made)
        made.append(f"a{len(made)}")
        lines.append(f"{made[-1]} = {rng.choice(ROWS_OF)}")
        return made[-1]

    def cache():
        i = rng.randrange(len(shapes) + 1) if rng.random() < 0.2 else len(shapes)
        if i == len(shapes) or shapes[i][1] == (ROWS, 8):
            i, form = len(shapes), rng.choice([*CACHES, *["{c}"] * 6])
            shapes.append((form, CACHES[form]))
        return shapes[i][0].format(c=f"c{i}")

    def between():
        if rng.random() < 0.25:
            lines.append(rng.choice(BETWEEN).format(a=rows()))

    ids = rng.choice([*IDS, *["loc"] * 12])
    lines.append(f"own = {ids}")
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        between()
        k, v = rows(), rows()
        if rng.random() < 0.15:
            shapes.append(("{c}", (ROWS, 8)))
            lines.append(f"store_latent(c{len(shapes) - 1}, {k}[:, 1] * 2, own)")
        else:
            lines.append(f"store_kv({cache()}, {cache()}, {k}, {v}, own)")
        between()
    ends = [rng.choice(ENDS).format(a=rows()) for _ in range(rng.randint(0, 4))]
    ends += [rng.choice(ends)] if ends and rng.random() < 0.2 else []
    lines.append(f"return [{', '.join(ends)}]")
    given = ", ".join(["x", "z", "w", "loc", *(f"c{i}" for i in range(len(shapes)))])
    return f"def forward({given}):\n    " + "\n    ".join(lines) + "\n", shapes, ids


def arguments(seed, shapes, ids, n):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-24, 25, shape, generator=rng) / 8

    loc = torch.randperm(ROWS - 2, generator=rng)[:n] + 2
    if n and seed % 3:
        loc[seed % n] = -1
    loc = loc.int() if seed % 2 else loc
    x = draw(n, 2, 8) if seed % 5 else draw(2, n, 8).transpose(0, 1)
    return [x, draw(n, 2, 8), draw(8), IDS[ids](loc), *(draw(*shape) for _, shape in shapes)]


@pytest.fixture
def programs(gpu_form, monkeypatch):
    """Each row program that ran, with what it left."""
    found, rule = [], row_program.run

    def watched(text, written, inputs, tokens):
        before, kept = ([t.clone() for t in ts] for ts in (written, inputs))
        rule(text, written, inputs, tokens)
        found.append((text, before, kept, tokens, [t.clone() for t in written]))

    monkeypatch.setattr(row_program, "run", watched)
    return found


def shared(tensors):
    """Which of `tensors` lie in one storage."""
    at = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    return [at.index(pointer) for pointer in at]


def steps(tensor):
    """The strides by which one gets from an element to another one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1 and tensor.numel()]


def same(want, got, what):
    assert (want.dtype, want.shape) == (got.dtype, got.shape), what
    assert torch.equal(want.nan_to_num(), got.nan_to_num()), f"{what}:\n{want}\n{got}"


def compiled(forward, backend, args, n, dynamic):
    torch._dynamo.reset()
    for tensor in (args[0], args[1], args[3]) if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(tensor, [*tensor.shape, n].index(n) % tensor.dim())
    return torch.compile(forward, backend=backend, fullgraph=True)(*args)


def check(seed, programs):
    text, shapes, ids = source(seed)
    n, dynamic = (5, 8, 2, 1, 5, 0)[seed % 6], seed % 4 == 1
    names = {"torch": torch, "store_kv": store_kv, "store_latent": store_latent, "ROWS": ROWS}
    exec(compile(text, f"<ends {seed}>", "exec"), names)
    forward = names["forward"]
    eager, plain, mine = (arguments(seed, shapes, ids, n) for _ in range(3))
    programs.clear()
    try:
        with torch.no_grad(), swa_compile.collect() as reports:
            want = forward(*eager)
            usual = compiled(forward, "aot_eager", plain, n, dynamic)
            got = compiled(forward, "swa_eager", mine, n, dynamic)
        for i, (a, b, c) in enumerate(zip(want, got, usual, strict=True)):
            same(a, b, f"output {i}")
            assert steps(b) == steps(c), f"output {i}: {b.stride()} for {c.stride()}"
        for i, (a, b) in enumerate(zip(eager, mine, strict=True)):
            same(a, b, f"argument {i}")
        assert shared([*got, *mine]) == shared([*usual, *plain])
        kernels(programs)
    except Exception as error:
        raise AssertionError(f"seed {seed}, n={n}, dynamic={dynamic}\n{text}") from error
    return sum(report.rows_fused for report in reports)


def kernels(programs):
    from swa_compile.ops import row_triton

    row_triton._fixed.cache_clear()
    row_triton._kernel.cache_clear()
    for text, before, inputs, tokens, after in programs:
        row_triton.run(text, before, inputs, tokens)
        for got, want in zip(before, after, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself there")
def test_what_is_given_back_is_what_eager_code_gives_back(programs, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    fused = sunk = 0
    seeds = range(FIRST, FIRST + (CAMPAIGN or 40))
    for seed in seeds:
        fused += check(seed, programs) > 0
        sunk += any(out["sink"] == 0 for text, *_ in programs for out in row_program.read(text))
    assert fused > len(seeds) // 3 and sunk > len(seeds) // 8
