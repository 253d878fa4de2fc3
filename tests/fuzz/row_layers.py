"""Random layers for fused rows: source text of what stands between a projection and its stores.

Every layer is plain torch code, so eager code is the oracle. Inputs are eighths of small whole
numbers: a value that is read from a wrong place or rounded once too often shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from swa_compile.ops import store_kv, store_latent, translate_loc

FULL, ROWS = 120, 40
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("row_fuzz::attend", mutates_args=())
def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Something that reads both caches and is given queries."""
    return q.float() * 2 + k_cache[1].float().sum() - v_cache[2].float().sum()


@attend.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@dataclass
class Value:
    """A name in the program: [N, heads, dim], or [1, heads, N, dim] where `ahead`."""

    name: str
    heads: int
    dim: int
    ahead: bool = False

    @property
    def sizes(self) -> str:
        return f"1, {self.heads}, n" if self.ahead else f"n, {self.heads}"


@dataclass
class Layer:
    """A drawn program.

    Attributes:
        lines: body of `forward(x, cos, sin, w, scale, ex, mapping, loc, caches)`.
        exact: False where an operator may round otherwise when it sees another layout.
    """

    seed: int
    n: int
    lines: list[str] = field(default_factory=list)
    exact: bool = True
    used: set[str] = field(default_factory=set)
    caches: list[tuple[Any, torch.dtype]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    width: int = 0
    dim: int = 0

    @property
    def source(self) -> str:
        body = "\n    ".join(self.lines)
        return f"def forward(x, cos, sin, w, scale, ex, mapping, loc, caches):\n    {body}\n"

    def function(self) -> Any:
        names = {
            "torch": torch,
            "F": F,
            "store_kv": store_kv,
            "store_latent": store_latent,
            "translate_loc": translate_loc,
            "attend": torch.ops.row_fuzz.attend,
        }
        exec(compile(self.source, f"<layer {self.seed}>", "exec"), names)
        return names["forward"]

    def arguments(self) -> list[Any]:
        rng = np.random.default_rng(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.from_numpy(rng.integers(-24, 25, shape) / 8).float()

        mapping = np.append(rng.permutation(FULL) % (ROWS - 1) + 1, -1)
        pick = {int(mapping[i]): int(i) for i in rng.permutation(FULL)}
        loc = rng.permutation(list(pick.values()))[: self.n]
        n, d, dtype = self.n, self.dim, self.dtype
        return [
            draw(n, self.width).to(dtype),
            draw(n, 2 * d).to(dtype)[:, ::2],  # gaps between its elements
            draw(n, d),
            draw(d, 3)[:, 1],
            torch.tensor(0.5),
            draw(n, 1, d).to(dtype).expand(n, 3, d),
            torch.from_numpy(mapping),
            torch.from_numpy(loc),
            [draw(*shape).to(kind) for shape, kind in self.caches],
        ]


class Draw:
    """Draws the statements of one layer."""

    def __init__(self, seed: int, n: int) -> None:
        self.rng = random.Random(seed)
        self.layer = Layer(seed, n)
        self.count = 0

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def emit(self, code: str, *, exact: bool = True) -> str:
        self.count += 1
        self.layer.lines.append(f"a{self.count} = {code}")
        self.layer.exact &= exact
        return f"a{self.count}"

    def changed(self, v: Value, code: str, exact: bool = True, **kwargs: Any) -> Value:
        given = {"heads": v.heads, "dim": v.dim, "ahead": v.ahead, **kwargs}
        return Value(self.emit(code, exact=exact), **given)

    def whole(self) -> Layer:
        layer = self.layer
        layer.dtype = self.one(*FLOATS)
        dim = self.one(4, 8, 8, 12, 16, 20)
        kv, group = self.one(1, 2, 3), self.one(1, 2)
        layer.dim, layer.width = dim, (kv * group + 2 * kv) * dim
        layer.lines += ["n = x.shape[0]", "own = translate_loc(mapping, loc)", "outs = []"]
        ahead = self.one(True, False)
        parts = f"x.split([{kv * group * dim}, {kv * dim}, {kv * dim}], -1)"
        layer.lines.append(f"q, k, v = {parts}")
        values = []
        for name, heads in (("q", kv * group), ("k", kv), ("v", kv)):
            code = f"{name}.view(n, {heads}, {dim})"
            if ahead:
                code = f"{name}.view(1, n, {heads}, {dim}).transpose(1, 2)"
            values.append(Value(self.emit(code), heads, dim, ahead))
        for i in range(self.one(1, 1, 2)):
            for at, most in ((0, 3), (1, 5), (2, 3)):
                for _ in range(self.rng.randint(0, most)):
                    values[at] = self.step(values[at], values)
            self.store(*values, again=i > 0)
        layer.lines.append("return outs")
        return layer

    def step(self, v: Value, others: list[Value]) -> Value:
        kind = self.rng.choice(STEPS)
        self.layer.used.add(kind.__name__)
        return kind(self, v, others) or v

    def store(self, q: Value, k: Value, v: Value, again: bool) -> None:
        """k and v to caches in one of the forms, and something that reads them."""
        q, k, v = (self.rows(value) for value in (q, k, v))
        layer, at = self.layer, len(self.layer.caches)
        dtype = self.one(*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
        float8 = "float8" in str(dtype)
        scale = self.one("", ", scale, scale", ", 0.5, 0.25") if float8 else ""
        same = (k.heads, k.dim) == (v.heads, v.dim)
        form = self.one(*(("two", "stacked", "pairs", "halves") if same else ("two", "latent")))
        shape = (ROWS, k.heads, k.dim)
        if again and layer.caches[0] == (shape, layer.caches[0][1]) and same and at == 2:
            form, places = "again", ("caches[0]", "caches[1]")
            scale = ""
            if layer.caches[1] != layer.caches[0]:
                return
        elif form == "two":
            layer.caches += [(shape, dtype), ((ROWS, v.heads, v.dim), dtype)]
            places = (f"caches[{at}]", f"caches[{at + 1}]")
        elif form == "latent":
            layer.caches.append(((ROWS, k.dim), dtype))
            tail = scale and scale[: scale.rindex(",")]
            latent = self.emit(f"{k.name}[:, {self.one(0, -1)}]")
            layer.lines.append(f"store_latent(caches[{at}], {latent}, own{tail})")
            return
        else:
            sizes, places = {
                "stacked": ((3, *shape), (f"caches[{at}][2]", f"caches[{at}][0]")),
                "pairs": (
                    (ROWS, 2, *shape[1:]),
                    (f"caches[{at}][:, 0]", f"caches[{at}][:, 1]"),
                ),
                "halves": (
                    (2 * ROWS, *shape[1:]),
                    (f"caches[{at}][:{ROWS}]", f"caches[{at}][{ROWS}:]"),
                ),
            }[form]
            layer.caches.append((sizes, dtype))
        layer.used.add(form)
        layer.lines.append(f"store_kv({', '.join(places)}, {k.name}, {v.name}, own{scale})")
        if self.one(True, True, False):
            layer.lines.append(f"outs.append(attend({q.name}, {', '.join(places)}))")
        if self.one(True, False, False):
            layer.lines.append(f"outs.append({self.one(q, k, v).name} * 1)")

    def rows(self, v: Value) -> Value:
        if not v.ahead:
            return v
        code = self.one(f"{v.name}.transpose(1, 2)[0]", f"{v.name}.squeeze(0).permute(1, 0, 2)")
        return self.changed(v, code, ahead=False)

    def rotation(self, v: Value, width: int) -> tuple[str, str]:
        here = "[None, None]" if v.ahead else "[:, None]"
        return tuple(f"{t}[:, :{width}]{here}" for t in ("cos", "sin"))  # type: ignore[return-value]


def norm(d: Draw, v: Value, _: Any) -> Value | None:
    up = d.one("", ".float()")
    back = d.one("", f".to({d.one('x.dtype', *FLOATS)})")
    w = d.one(f"w[:{v.dim}]", "2.0", f"cos[0, :{v.dim}]")
    if v.dim > d.layer.dim:
        w = "1.5"
    wide = d.emit(f"{v.name}{up}")
    over = d.one(
        f"{wide}.pow(2).mean(-1, keepdim=True)",
        f"({wide} * {wide}).mean(-1)[..., None]",
        f"{wide}.square().sum(-1, keepdim=True, dtype=torch.float32)",
    )
    code = f"({wide} * torch.rsqrt({over} + 1e-3) * {w}){back}"
    return d.changed(v, code, exact=False)


def torch_norm(d: Draw, v: Value, _: Any) -> Value | None:
    if v.dim > d.layer.dim:
        return None
    code = f"F.rms_norm({v.name}, ({v.dim},), w[:{v.dim}].to({v.name}.dtype), 1e-3)"
    if d.one(True, False):
        code = f"F.layer_norm({v.name}, ({v.dim},))"
    return d.changed(v, code, exact=False)


def other_reductions(d: Draw, v: Value, _: Any) -> Value:
    x = v.name
    return d.changed(
        v,
        d.one(
            f"{x} - {x}.mean(-1, keepdim=True)",
            f"{x} - {x}.amax(-1, keepdim=True)",
            f"{x} / ({x}.abs().amax(-1)[..., None] + 0.5)",
            f"{x} + {x}.amin(1, keepdim=True)",
            f"{x} * {x}.mean()",
            f"{x} + {x}[..., :1].expand(-1, {'-1, ' * v.ahead}-1, 8).mean(-1, keepdim=True)",
            f"{x} - {x}[..., :1].expand(-1, {'-1, ' * v.ahead}-1, 5).sum(-1, keepdim=True)",
            f"{x} - {x}[..., :3].sum(-1, keepdim=True)",
            f"{x} + {x}[..., :1].mean(-1, keepdim=True)",
        ),
        exact=False,
    )


def flat_norm(d: Draw, v: Value, _: Any) -> Value | None:
    if v.ahead:
        return None
    flat = d.emit(f"{v.name}.reshape(n, -1).float()")
    code = f"({flat} * torch.rsqrt({flat}.pow(2).mean(-1, keepdim=True) + 1e-3))"
    return d.changed(v, f"{code}.view(n, {v.heads}, {v.dim})", exact=False)


def rope(d: Draw, v: Value, _: Any) -> Value | None:
    r = d.one(*[r for r in (2, 4, 8, v.dim) if r <= min(v.dim, d.layer.dim) and r % 2 == 0] or [0])
    if not r:
        return None
    x, x0 = d.emit(f"{v.name}[..., :{r}]"), d.emit(f"{v.name}[..., {r}:]")
    kind = d.one("rotate_half", "half", "interleaved", "strided", "negative")
    h = r // 2
    if kind == "rotate_half":
        c, s = d.rotation(v, r)
        turned = d.emit(f"torch.cat((-{x}[..., {h}:], {x}[..., :{h}]), -1)")
        code = f"{x} * {c} + {turned} * {s}"
    else:
        c, s = d.rotation(v, h)
        if kind == "half":
            a, b = f"{x}.chunk(2, -1)[0]", f"{x}.chunk(2, -1)[1]"
        elif kind == "negative":
            a, b = f"{x}[..., -{r}:-{h}]", f"{x}[..., -{h}:]"
        elif kind == "interleaved":
            d.layer.lines.append(f"p = {x}.reshape({v.sizes}, {h}, 2)")
            a, b = "p[..., 0]", "p[..., 1]"
        else:
            a, b = f"{x}[..., ::2]", f"{x}[..., 1::2]"
        d.layer.lines += [f"a, b = {a}, {b}", f"c, s = {c}, {s}"]
        pieces = "(a * c - b * s, b * c + a * s)"
        joined = kind in ("half", "negative")
        code = f"torch.cat({pieces}, -1)" if joined else f"torch.stack({pieces}, -1).flatten(-2)"
    return d.changed(v, f"torch.cat(({code}, {x0}), -1)")


def arithmetic(d: Draw, v: Value, _: Any) -> Value:
    x = v.name
    exact = [
        f"{x} * {d.one(0.1, 3, -2.5)}",
        f"0.3 - {x}",
        f"1.7 / ({x}.abs() + 0.5)",
        f"{x} / {d.one(3, 0.7)}",
        f"{x} + 0.1",
        f"-{x}",
        f"{x}.abs().sqrt()",
        f"{x} ** 2",
        f"({x}.abs() + 1).reciprocal()",
        f"{x}.relu() - 1",
        f"{x}.clamp(-1.5, 2)",
        f"{x}.clamp(max=float('inf')) * 2",
        f"torch.maximum({x}, {x}.neg() * 0.5)",
        f"{x} * scale",
        f"{x} / (scale + 1)",
        f"{x} * -0.0 + {x} * 0.0 + {x}",
        f"torch.add({x}, {x}, alpha=2)",
        f"torch.where({x} > 0, {x}, {x} * 0.5)",
        f"({x}.clamp(-9, 9) * 8).int().float() / 8",
    ]
    rough = [
        f"{x}.sigmoid() * {x}",
        f"({x} * 0.125).clamp(-4, 4).exp()",
        f"{x}.cos() + {x}.sin()",
        f"torch.rsqrt({x}.abs() + 0.5)",
        f"F.silu({x})",
    ]
    if d.one(True, True, False):
        return d.changed(v, d.one(*exact))
    return d.changed(v, d.one(*rough), exact=False)


def cast(d: Draw, v: Value, _: Any) -> Value:
    tail = d.one(
        *(f".to({t})" for t in (*FLOATS, "x.dtype")),
        ".clamp(-400, 400).to(torch.float8_e4m3fn).float()",
        ".to(torch.float8_e5m2).to(torch.bfloat16)",
        ".to(torch.bfloat16).view(torch.float16).clamp(-8, 8)",
        ".double().float()",
        ".clone()",
        ".contiguous()",
    )
    return d.changed(v, v.name + tail)


def views(d: Draw, v: Value, _: Any) -> Value:
    x, s, dim, heads = v.name, v.sizes, v.dim, v.heads
    places = [
        f"({x}.reshape(-1, {dim}) * 2).view({s}, {dim})",
        f"({x}.transpose(-1, -2) * 3).transpose(-1, -2)",
        f"({x}.reshape({s}, 2, {dim // 2}).transpose(-1, -2) + 0.5).reshape({s}, {dim})",
        f"({x}.reshape({s}, {dim // 2}, 2).transpose(-1, -2)).reshape({s}, {dim}) * 2",
        f"({x}.unsqueeze(1) * 2).squeeze(1)",
        f"({x}.unflatten(-1, (2, -1)) * 2).flatten(-2)",
        f"torch.stack({x}.unbind(-1), -1) * 2",
        f"({x}.permute({'0, 3, 1, 2' if v.ahead else '2, 0, 1'}) * 2)"
        f".permute({'0, 2, 3, 1' if v.ahead else '1, 2, 0'})",
        f"{x} + {x}[..., -1:]",
        f"{x} + {x}[..., 1].unsqueeze(-1)",
        f"{x} * {x}[{'0, 0' if v.ahead else '0'}, 0, 0]",
        f"({x} * 2).flip(-1)",
    ]
    if not v.ahead:
        places += [
            f"({x}.reshape(n, -1) * 2).view(n, {heads}, {dim})",
            f"({x}.reshape(n, {dim}, {heads}) - 1).reshape(n, {heads}, {dim})",
            f"({x}.transpose(0, 1).reshape(-1, {dim}) * 2).view({heads}, n, {dim}).transpose(0, 1)",
        ]
    return d.changed(v, d.one(*places))


def joined(d: Draw, v: Value, others: list[Value]) -> Value:
    x, dim = v.name, v.dim
    r = d.one(0, 1, 2, 3)
    axis = 2 if v.ahead else 0
    first = ":, :, :1" if v.ahead else ":1"
    rest = ":, :, 1:" if v.ahead else "1:"
    return d.changed(
        v,
        d.one(
            f"torch.cat(({x}[..., {dim - r}:] * 2, {x}[..., :{dim - r}]), -1)",
            f"torch.cat(({x}[..., :{r}], {x}[..., {r}:{dim}] * 3), -1)",
            f"torch.cat(({x}[..., :2].float(), {x}[..., 2:] * 0.3), -1) * 0.1",
            f"torch.cat(({x} * 2,), -1)",
            f"torch.cat(({x}.new_empty(0), {x} * 2), -1)",
            f"torch.cat(({x}[{first}] * 2, {x}[{rest}]), {axis}) + 1",
            f"torch.cat(({x}[{rest}] * 2, {x}[{first}]), {axis})",
            f"F.pad({x}[..., 1:] * 2, (1, 0))",
            f"{x}.roll(1, -1) * 2",
        ),
    )


def heads(d: Draw, v: Value, others: list[Value]) -> Value:
    x, h = v.name, v.heads
    tail = d.one("", " * 2")
    normed = f"({x} - {x}.amax(-1, keepdim=True))"
    choices = [
        (f"torch.cat(({x} * 2, {x}[:, :1]), 1)", h + 1),
        (f"torch.cat(({normed}, {x}[:, -1:] + 1), 1)", h + 1),
        (f"torch.cat(({x}[:, :1] + 1, {normed}), 1)", h + 1),
        (f"{x}[:, -1:]{tail}", 1),
        (f"{x}[:, ::2]{tail}", -(-h // 2)),
        (f"({x} + 1)[:, :1].expand(-1, 3, {'-1, ' * v.ahead}-1){tail}", 3),
        (f"torch.cat(({x}, {x}.neg()), 1){tail}", 2 * h),
        (f"({x} * 2).repeat_interleave(2, 1){tail}", 2 * h),
    ]
    if not v.ahead:
        code = f"{x}[:, :, None].expand(n, {h}, 2, {v.dim}).reshape(n, {2 * h}, {v.dim}){tail}"
        choices.append((code, 2 * h))
        if v.dim == d.layer.dim and h in (1, 3):
            choices.append((f"{x} + ex", 3))
            choices.append((f"torch.cat((ex{tail}, {x}), 1)", h + 3))
    code, count = d.one(*[c for c in choices if c[1] <= 6])
    return d.changed(v, code, heads=count, exact=normed not in code)


def dims(d: Draw, v: Value, others: list[Value]) -> Value | None:
    if v.dim < 8:
        return None
    code, dim = d.one(
        (f"{v.name}[..., 1:-1]", v.dim - 2),
        (f"{v.name}[..., ::2] * 2", v.dim // 2),
        (f"{v.name}[..., -4:] + 1", 4),
    )
    return d.changed(v, code, dim=dim)


def together(d: Draw, v: Value, others: list[Value]) -> Value | None:
    fit = [o for o in others if o.ahead == v.ahead and o.dim == v.dim and o.heads >= v.heads]
    o = d.rng.choice(fit or [v])
    if o.heads < v.heads:
        return None
    return d.changed(v, f"{v.name} {d.one('+', '*')} {o.name}[:, :{v.heads}]")


def layout(d: Draw, v: Value, _: Any) -> Value | None:
    if v.ahead:
        return d.rows(v)
    return d.changed(v, f"{v.name}.transpose(0, 1)[None]", ahead=True)


def cached(d: Draw, v: Value, _: Any) -> Value | None:
    """Rows that a cache held before, copied or seen through a view."""
    if not d.layer.caches or v.ahead:
        return None
    shape, _kind = d.layer.caches[0]
    if shape[1:] != (v.heads, v.dim):
        return None
    rows = d.one("caches[0][own].float()", "caches[0][1:n + 1].float()", "caches[0][:n].float()")
    return d.changed(v, f"{v.name} + {rows} * 0")


STEPS = [norm, torch_norm, other_reductions, flat_norm, rope, rope, rope, arithmetic, arithmetic]
STEPS += [cast, views, views, joined, joined, heads, heads, dims, together, layout, cached]
