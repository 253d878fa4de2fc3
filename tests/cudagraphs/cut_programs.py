"""Random forwards for code that is cut: layers of attention, and statements between them.

A program is Python source, drawn line by line. A line is tried on real tensors as it is drawn and
left out where torch refuses it, so that what is left is a forward that eager code can run.
"""

import random

import torch

from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

from .cut_statements import DIM, HEADS, MAKES, MOST, RETURNS, WRITES, W

FULL, ROWS = 64, 24

ARGUMENTS = (
    *("x", "y", "s", "ids", "out", "big", "base", "vw", "mapping", "loc", "table", "lens", "cu"),
    *("k0", "v0", "k1", "v1"),
)
SCOPE = {
    "torch": torch,
    "paged_attention": paged_attention,
    "store_kv": store_kv,
    "translate_loc": translate_loc,
    "translate_page_table": translate_page_table,
    **{"W": W, "HEADS": HEADS, "DIM": DIM, "MOST": MOST},
}
# What is there of a kind before anything was drawn.
GIVEN = {
    "F": ["x", "y", "out", "vw"],
    "V": ["s"],
    "I": ["ids"],
    "X": ["big"],
    "S": ["self.hist[0]"],
    "E": ["x"],
    "C": ["torch.cat([x, y], 1)"],
    "D": ["torch.cat([x, y])"],
    "T": ["x.t()"],
    "H": ["x.view(-1, HEADS, DIM)"],
    "B": ["(x > y)"],
    "Z": ["x.mean()"],
}


class State(torch.nn.Module):
    """Weights, and buffers that a forward may write."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        for name in ("w0", "w1", "w2"):
            weight = torch.randn(W, W, generator=g) / 4
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.register_buffer("hist", torch.randn(4, W, generator=g) / 2)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def make_caches():
    g = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(rows, HEADS, DIM, generator=g)
        for name, rows in (("k0", FULL), ("v0", FULL), ("k1", ROWS), ("v1", ROWS))
    }


def make_batch(n, seed):
    """What changes from call to call, name -> tensor; `vw` lies in `base`."""
    g = torch.Generator().manual_seed(seed)

    def random_rows(*shape):
        return torch.randn(*shape, generator=g) / 2

    mapping = torch.zeros(FULL + 2, dtype=torch.int64)
    full = torch.randperm(FULL - 1, generator=g)[: ROWS - 1] + 1
    mapping[full] = torch.randperm(ROWS - 1, generator=g) + 1
    mapping[-1] = -1
    base = random_rows(n + 2, W)
    return {
        "x": random_rows(n, W),
        "y": random_rows(n, W),
        "s": random_rows(n),
        "ids": torch.randint(0, 16, (n,), generator=g),
        "out": random_rows(n, W),
        "big": random_rows(MOST, W),
        "base": base,
        "vw": base[1:-1],
        "mapping": mapping,
        "loc": full[:n].clone(),
        "table": full[torch.randint(0, ROWS - 1, (n, 6), generator=g)].int(),
        "lens": torch.randint(1, 7, (n,), generator=g).int(),
        "cu": torch.arange(n + 1, dtype=torch.int32),
    }


def model_of(source):
    """A module whose forward is `source`."""
    scope = dict(SCOPE)
    exec(compile(source, "<program>", "exec"), scope)
    return type("Drawn", (State,), {"forward": scope["forward"]})()


class Program:
    """One drawn forward; `source` is its text."""

    def __init__(self, seed, layers=3, statements=9, writes=0.3):
        self.random = random.Random(seed)
        self.writes = writes
        self.pools = {kind: [] for kind in MAKES}
        for kind in ("F", "V", "I", "X", "S"):
            self.pools[kind] += GIVEN[kind]
        self.lines = []
        # The same statements on two sizes, so that what is kept is valid at both.
        self.scopes = [
            {**SCOPE, **make_batch(n, seed), **make_caches(), "self": State(), "N": n}
            for n in (5, 7)
        ]
        for kind in MAKES:
            self.make(kind)
        for _ in range(layers):
            self.draw(statements, "FFFFFFFFECCDDTTHHVVSIIBZX")
            self.layer()
        self.draw(statements // 2, "F")
        returns = []
        while len(returns) < 10:
            returned = self.fill(self.random.choice(RETURNS))
            if self.takes(f"_ = {returned}") and (returned == "vw" or not self.in_base("_")):
                returns.append(returned)
        returns += [self.pools["F"][-1]] * 2  # twice the same
        body = "".join(f"    {line}\n" for line in ["N = x.shape[0]", *self.lines])
        self.source = (
            f"def forward(self, {', '.join(ARGUMENTS)}):\n{body}"
            f"    return ({', '.join(returns)},)\n"
        )

    def in_base(self, name):
        """Whether it lies where two inputs do: AOTAutograd makes such outputs of a wrong shape."""
        value, base = (self.scopes[0][name] for name in (name, "base"))
        return torch.is_tensor(value) and storage(value) == storage(base)

    def draw(self, statements, kinds):
        for _ in range(statements):
            if self.random.random() < self.writes:
                any(self.add(self.fill(self.random.choice(WRITES))) for _ in range(5))
            else:
                self.make(self.random.choice(kinds))

    def make(self, kind):
        any(self.value(kind, self.fill(self.random.choice(MAKES[kind]))) for _ in range(5))

    def layer(self):
        """Up to two stores, and an attention."""
        for _ in range(self.random.choice([0, 1, 1, 2])):
            i = self.random.randrange(2)
            at = "translate_loc(mapping, loc)" if i else "loc"
            self.add(self.fill(f"store_kv(k{i}, v{i}, {{H}}, {{H}}, {at})"))
        i = self.random.randrange(2)
        table = f"translate_page_table(mapping, table, 1){self.random.choice(['', '.int()'])}"
        q = self.fill(self.random.choice(["{H}", "{F}.view(-1, HEADS, DIM)", "{H}.sin()"]))
        window = self.random.choice(["", "", ", window=2"])
        table = table if i else "table"
        if self.value("H", f"paged_attention({q}, k{i}, v{i}, {table}, lens, cu{window})"):
            self.make("F")

    def value(self, kind, expression):
        """Whether `expression` was taken, for another value of that kind."""
        name = f"r{sum(map(len, self.pools.values()))}_{kind}"
        taken = self.add(f"{name} = {expression}", name, kind)
        self.pools[kind] += [name] * taken
        return taken

    def fill(self, template):
        """`template` with a value in each of its places."""
        text, at = "", 0
        while (start := template.find("{", at)) >= 0:
            end = template.index("}", start)
            text += template[at:start] + self.pick(template[start + 1 : end])
            at = end + 1
        return text + template[at:]

    def pick(self, kind):
        if kind == "w":
            return f"self.w{self.random.randrange(3)}"
        if kind in ("two", "three"):
            return str(self.random.randrange({"two": 2, "three": 3}[kind]))
        pool = self.pools[kind] or GIVEN[kind]
        if kind == "E" and self.random.random() < 0.6:
            pool = self.pools["F"]
        return self.random.choice(pool[-5:] if self.random.random() < 0.5 else pool)

    def add(self, line, name=None, kind=None):
        taken = self.takes(line, name, kind)
        self.lines += [line] * taken
        return taken

    def takes(self, line, name=None, kind=None):
        """Whether torch takes the line, at both sizes; all is as it was where it does not."""
        before = [
            [(v, v.clone()) for v in (*scope.values(), *scope["self"].buffers()) if _writable(v)]
            for scope in self.scopes
        ]
        try:
            for scope in self.scopes:
                exec(line, scope)
                if name is not None:
                    _check(scope[name], kind, scope["N"])
        except (RuntimeError, ValueError, IndexError, TypeError):
            for tensors in before:
                for tensor, content in tensors:
                    tensor.copy_(content)
            return False
        return True


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def _writable(value):
    """Whether `value` is a tensor that has each of its elements once."""
    if not isinstance(value, torch.Tensor):
        return False
    steps = zip(value.shape, value.stride(), strict=True)
    return not any(stride == 0 and size > 1 for size, stride in steps)


def _check(value, kind, n):
    """See that `value` is one of that kind, and that its numbers stay small."""
    shapes = {"H": (n, HEADS, DIM), "C": (n, 2 * W), "D": (2 * n, W), "T": (W, n), "V": (n,)}
    shapes |= {"S": (W,), "I": (n,), "Z": (), "X": (MOST, W)}
    dtype = {"I": torch.int64, "B": torch.bool}.get(kind, torch.float32)
    if (tuple(value.shape), value.dtype) != (shapes.get(kind, (n, W)), dtype):
        raise ValueError(kind)
    if value.is_floating_point() and not value.abs().max() < 50:
        raise ValueError(kind)
