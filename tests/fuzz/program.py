"""Random forwards: each drawn as Python source, together with what NumPy makes of it.

A `Program` grows one line at a time. A line is the source of a torch statement, and is carried out
on NumPy arrays at once, so what may follow is decided on real values: ids that a mapping has,
slots that are free of duplicates. NumPy's views share memory where torch's do, hence the arrays
are, after the last line, what every input and register has to hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from swa_compile import ops

FULL, ROWS, HEADS, DIM, PAGES = 96, 48, 2, 4, 12
CARVED = ("offset", "holes", "step")  # cache inputs that are parts of a larger allocation
PAGE_SIZES = (1, 4, 16)
DTYPES = {
    torch.float32: np.float32,
    torch.bfloat16: np.float32,  # only small integers are stored, which all of these hold
    torch.float8_e4m3fn: np.float32,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}
NAMES = {"torch": torch} | {name: getattr(ops, name) for name in ops.__all__}


@dataclass(repr=False)
class Program:
    """A forward under construction and its state in NumPy.

    Attributes:
        bases: name -> (initial array, torch dtype) of each allocation.
        inputs: name -> (base, index): the arguments, which may share an allocation.
        values: name -> array, of inputs and registers, as they are now.
        registers: names of those that may be used as ids.
        kept: registers that something else needs the contents of.
        translated: registers that a translation took part in.
        caches: (source, array, base) of each cache that a store may be given.
        marked: calls of translation operators so far.
        written, activations, branches, chained: whether an index input was written, ids come from
            floating-point values, there is a `torch.cond`, or a translation of a translation.
    """

    bases: dict = field(default_factory=dict)
    live: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)
    lines: list = field(default_factory=list)
    registers: list = field(default_factory=list)
    kept: set = field(default_factory=set)
    translated: set = field(default_factory=set)
    caches: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    marked: int = 0
    written: bool = False
    chained: bool = False
    activations: bool = False
    branches: bool = False

    def allocate(self, base, array, dtype):
        self.bases[base] = (array.copy(), dtype)
        self.live[base] = array.copy()

    def input(self, name, base, index=...):
        self.inputs[name] = (base, index)
        self.values[name] = self.live[base][index]

    def new(self, code, value, *uses):
        """A register that holds `code`, which is `value`."""
        name = f"r{len(self.values) - len(self.inputs)}"
        self.lines.append(f"{name} = {code}")
        self.values[name] = np.asarray(value)
        self.registers.append(name)
        self.kept.update(uses)
        if code.startswith("translate") or self.translated.intersection(uses):
            self.translated.add(name)
        return name

    def write(self, code, name):
        """A statement that has changed the array of `name` in place."""
        self.lines.append(code)
        array = self.values[name]
        while array.base is not None:
            array = array.base
        self.written |= any(array is base for base in self.live.values())

    def shares_inputs(self):
        """Whether an input is a part of an allocation, or lies in that of another input."""
        return any(base != name or index is not ... for name, (base, index) in self.inputs.items())

    def source(self):
        body = "".join(f"    {line}\n" for line in self.lines)
        returned = "".join(f"{name}, " for name in self.outputs)
        return f"def forward({', '.join(self.inputs)}):\n{body}    return ({returned})\n"

    def function(self):
        scope = dict(NAMES)
        exec(compile(self.source(), "<program>", "exec"), scope)
        return scope["forward"]

    def tensors(self):
        """Fresh (bases, arguments) as torch has them at the start."""
        bases = {
            name: torch.from_numpy(array.copy()).to(dtype)
            for name, (array, dtype) in self.bases.items()
        }
        return bases, [bases[base][index] for base, index in self.inputs.values()]

    def __repr__(self):
        inputs = "".join(
            f"# {name} = {base}[{show(index)}], {base}: {self.bases[base][1]}"
            f" {list(self.bases[base][0].shape)}"
            + (f" {self.bases[base][0].tolist()}\n" if self.bases[base][0].size < 100 else "\n")
            for name, (base, index) in self.inputs.items()
        )
        return f"\n{inputs}{self.source()}"


def show(index):
    """The source of an index."""
    if index is ...:
        return "..."
    if isinstance(index, tuple):
        return ", ".join(map(show, index))
    if isinstance(index, slice):
        parts = ["" if part is None else str(part) for part in (index.start, index.stop)]
        return ":".join(parts + ([str(index.step)] if index.step not in (None, 1) else []))
    return str(index)


# The rules of semantics.md, one id at a time.
def translate(kind, mapping, ids, page_size=1):
    """What a translation gives, or None where an id is out of range."""
    out = np.empty(ids.shape, np.int64)
    for at in np.ndindex(ids.shape):
        i = int(ids[at])
        if i < -1 or (kind != "paged" and i * page_size >= len(mapping)):
            return None
        if kind == "paged":
            page, lane = divmod(i, page_size)
            known = i >= 0 and page < len(mapping) and mapping[page] >= 0
            out[at] = mapping[page] * page_size + lane if known else 0
        elif i == -1:
            out[at] = -1
        else:
            out[at] = mapping[i * page_size] // page_size
    return out


def may_store(ids, rows):
    live = ids[ids > 0]
    return (
        ids.ndim == 1
        and ids.dtype in (np.int32, np.int64)
        and (not ids.size or (ids.min() >= -1 and ids.max() < rows))
        and len(set(live.tolist())) == len(live)
    )


def one_of(draw, *choices):
    return draw(st.sampled_from(choices))


def draw_inputs(draw, p):
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    n = one_of(draw, 0, 1, 2, 3, 4, 6, 6, 8)

    def mapping():
        ids = np.zeros(FULL + 1, np.int64)  # those without a row were evicted
        ids[rng.permutation(FULL)[: ROWS - 1]] = rng.permutation(ROWS - 1) + 1
        ids[-1] = -1
        return ids

    def ids(*shape):
        found = rng.permutation(FULL - 1)[: np.prod(shape, dtype=int)] + 1
        found[rng.random(found.shape) < 0.15] = one_of(draw, -1, 0)
        return found.reshape(shape)

    def index_input(name, array, dtype):
        p.allocate(name, array.astype(DTYPES[dtype]), dtype)
        p.input(name, name)

    p.allocate("m0", mapping(), torch.int64)
    p.input("m0", "m0")
    second = one_of(draw, "own", "own", "same", "part")
    if second == "own":
        p.allocate("m1", mapping(), torch.int64)
    start = slice(one_of(draw, 1, 16), None) if second == "part" else ...
    p.input("m1", "m1" if second == "own" else "m0", start)
    pages = rng.permutation(PAGES)
    pages[rng.random(PAGES) < 0.2] = -1
    index_input("pages", pages, torch.int64)
    index_input("loc", ids(n), one_of(draw, torch.int64, torch.int64, torch.int32))
    if one_of(draw, True, False, False) and n:
        p.input("loc2", "loc", slice(one_of(draw, 0, 1), None))
    else:
        index_input("loc2", ids(one_of(draw, n, 5, 1)), one_of(draw, torch.int64, torch.int32))
    table = one_of(draw, (2, 3), (3, 1), (1, 2, 3), (2, 2, 2), (n, 2))
    index_input("table", ids(*table) % one_of(draw, 6, FULL), torch.int32)
    index_input("req", ids(4, 8), torch.int32)
    index_input("rows", rng.permutation(4)[: one_of(draw, 0, 1, 2, 4)], torch.int64)
    index_input("flag", np.array(one_of(draw, True, False)), torch.bool)
    x = rng.integers(-7, 8, (64, HEADS, DIM)).astype(np.float32)
    p.allocate("x", x, torch.float32)
    p.input("x", "x")
    draw_caches(draw, p, rng)


def draw_caches(draw, p, rng):
    """Caches that share an allocation in the ways of engines, and inputs that are parts of one."""
    row = (HEADS, DIM)
    layouts = {
        "separate": ((ROWS, *row), [()]),
        "stacked": ((3, ROWS, *row), [(0,), (1,), (2,)]),
        "halves": ((2, ROWS, *row), [(0,), (1,)]),
        "interleaved": ((ROWS, 2, *row), [(slice(None), 0), (slice(None), 1)]),
        "all in one": ((2, 2, ROWS, *row), [(i, j) for i in (0, 1) for j in (0, 1)]),
        "layers inside": ((2, ROWS, 2, *row), [(1, slice(None), j) for j in (0, 1)]),
        "slices": ((3 * ROWS, *row), [(slice(i * ROWS, (i + 1) * ROWS),) for i in range(3)]),
        "latent": ((ROWS, DIM), [()]),
        "latent stacked": ((2, ROWS, 1, DIM), [(0,), (1,)]),
    }
    for i in range(one_of(draw, 1, 2, 3)):
        shape, places = layouts[one_of(draw, *layouts)]
        dtype = one_of(draw, torch.float32, torch.float32, torch.bfloat16, torch.float8_e4m3fn)
        carved = one_of(draw, ..., ..., ..., *CARVED)
        whole = list(shape)
        if carved == "offset":
            whole[0], carved = whole[0] + 1, slice(1, None)
        elif carved == "holes":
            whole[1], carved = whole[1] + 1, (slice(None), slice(1, None))
        elif carved == "step":
            whole[0], carved = 2 * whole[0], slice(None, None, 2)
        name = f"kv{i}"
        p.allocate(name, rng.integers(-7, 8, whole).astype(np.float32), dtype)
        p.input(name, name, carved)
        for place in places:
            source = f"{name}[{show(place)}]" if place else name
            p.caches.append((source, p.values[name][(*place, ...)], name))


def draw_view(draw, a):
    """(template, function): a view or copy of the same elements of `a`, or of some of them."""
    kind = one_of(draw, "slice", "slice", "slice", "shape", "order", "copy", "cast", "half")
    if a.ndim == 0:
        return one_of(
            draw,
            ("{0}.view(1)", lambda a: a.reshape(1)),
            ("{0}[None]", lambda a: a[None]),
            ("{0}.clone()", np.copy),
        )
    if kind == "half":
        h = len(a) // 2
        return one_of(
            draw,
            ("{0}[: {0}.shape[0] // 2]", lambda a: a[:h]),
            ("{0}[{0}.shape[0] // 2 :]", lambda a: a[h:]),
            ("{0}[:-1]", lambda a: a[:-1]),
            ("{0}[-3:]", lambda a: a[-3:]),
        )
    if kind == "slice":
        dim = draw(st.integers(0, a.ndim - 1))
        size = a.shape[dim]
        at = st.none() | st.integers(-size - 1, size + 1)
        step = one_of(draw, 1, 1, 1, 2, 3)
        one = size and a.ndim > 1 and one_of(draw, True, False)
        part = draw(st.integers(-size, size - 1)) if one else slice(draw(at), draw(at), step)
        index = (slice(None),) * dim + (part,)
        return f"{{0}}[{show(index)}]", lambda a: a[(*index, ...)]
    if kind == "shape":
        size = a.size
        options = [
            ("{0}.reshape(-1)", lambda a: a.reshape(-1)),
            ("{0}.flatten()", lambda a: a.reshape(-1)),
            ("{0}.unsqueeze(-1)", lambda a: a[..., None]),
            ("{0}.unsqueeze(0)", lambda a: a[None]),
            ("{0}[None].expand(2, *{0}.shape)", lambda a: np.broadcast_to(a, (2, *a.shape))),
            ("{0}.squeeze()", np.squeeze),
        ]
        if size % 2 == 0 and size:
            options.append(("{0}.reshape(-1, 2)", lambda a: a.reshape(-1, 2)))
            options.append(("{0}.reshape(2, -1)", lambda a: a.reshape(2, -1)))
            if a.flags.c_contiguous:
                options.append(("{0}.view(2, {0}.numel() // 2)", lambda a: a.reshape(2, -1)))
        if size % 6 == 0 and size:
            options.append(("{0}.reshape(-1, 3, 2)", lambda a: a.reshape(-1, 3, 2)))
        return one_of(draw, *options)
    if kind == "order":
        axes = tuple(draw(st.permutations(range(a.ndim))))
        return one_of(
            draw,
            (f"{{0}}.permute({', '.join(map(str, axes))})", lambda a: a.transpose(axes)),
            ("{0}.flip(0)", lambda a: a[::-1].copy()),
            ("{0}.sort(0).values", lambda a: np.sort(a, 0)),
        )
    if kind == "copy":
        return one_of(draw, ("{0}.clone()", np.copy), ("{0}.contiguous()", np.ascontiguousarray))
    name = one_of(draw, "int64", "int64", "int32", "int16", "int8", "uint8")
    if name in ("int64", "int32"):
        return f"{{0}}.to(torch.{name})", lambda a: a.astype(name, copy=False)
    return f"{{0}}.to(torch.{name}).long()", lambda a: a.astype(name).astype(np.int64)


def draw_chain(draw, p, name, most):
    """Registers with up to `most` views over `name`; the last of them, and how to do it again."""
    chain, a = [], p.values[name]
    for _ in range(draw(st.integers(0, most))):
        template, function = draw_view(draw, a)
        a = np.asarray(function(a))
        chain.append((template, function))

    def again():
        last = name
        for template, function in chain:
            last = p.new(template.format(last), function(p.values[last]), last)
        return last

    return again
