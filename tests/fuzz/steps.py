"""What a drawn program may do: one function per kind of statement."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from .program import (
    PAGE_SIZES,
    ROWS,
    Program,
    draw_chain,
    draw_inputs,
    may_store,
    one_of,
    translate,
)

IDS = ("loc", "loc", "loc2", "table", "req")


def ids_of(draw, p):
    """The name of some ids: an input, or something made of one."""
    recent = p.registers[-6:]
    return one_of(draw, *(IDS if draw(st.booleans()) or not recent else recent))


def translation(draw, p, name=None, call=None):
    """A register with a translation of `name`, or None where its ids are out of range."""
    name = name or ids_of(draw, p)
    kind, mapping, size = call or draw_call(draw)
    ids = p.values[name]
    want = translate(kind, p.values[mapping], ids, size)
    if want is None or ids.dtype not in (np.int32, np.int64):
        return None
    p.marked += 1
    p.chained |= not p.translated.isdisjoint((name, mapping))
    if kind == "token":
        code = f"translate_loc({mapping}, {name})"
    elif kind == "page table":
        code = f"translate_page_table({mapping}, {name}, {size})"
    else:
        code = f"translate_paged_loc({mapping}, {name}, {size})"
    return p.new(code, want, name)


def draw_call(draw):
    kind = one_of(draw, "token", "token", "token", "page table", "paged")
    mapping = "pages" if kind == "paged" else one_of(draw, "m0", "m0", "m1")
    return kind, mapping, 1 if kind == "token" else one_of(draw, *PAGE_SIZES)


def views(draw, p):
    draw_chain(draw, p, ids_of(draw, p), 3)()


def plain_translation(draw, p):
    made = translation(draw, p)
    if made and draw(st.booleans()):
        draw_chain(draw, p, made, 2)()


def parts(draw, p):
    """A tensor translated in parts, which may or may not be the whole of it."""
    name, call = ids_of(draw, p), draw_call(draw)
    a = p.values[name]
    if a.ndim == 0:
        return
    cuts = sorted(draw(st.lists(st.integers(0, len(a)), max_size=2)))
    for start, stop in zip([0, *cuts], [*cuts, len(a)], strict=True):
        part = p.new(f"{name}[{start}:{stop}]", a[start:stop], name)
        translation(draw, p, part, call)


def layers(draw, p):
    """The same in every layer: views over ids, their translation, a store."""
    call = draw_call(draw)
    again = draw_chain(draw, p, ids_of(draw, p), 2)
    for _ in range(one_of(draw, 2, 2, 3)):
        made = translation(draw, p, again(), call)
        if made is None:
            return
        store(draw, p, made)


def arithmetic(draw, p):
    name = ids_of(draw, p)
    a, c = p.values[name], draw(st.integers(1, 17))
    code, value = one_of(
        draw,
        (f"{name} + {c}", a + c),
        (f"{name} - {c}", a - c),
        (f"{name} * 2", a * 2),
        (f"{name} // {c}", a // c),
        (f"{name} % {c}", a % c),
        (f"{name}.clamp(0, {c})", a.clip(0, c)),
        (f"{name}.clamp_min(0)", a.clip(0, None)),
        (f"torch.where({name} > {c}, {name}, 0)", np.where(a > c, a, 0)),
        (f"torch.where({name} < 0, {name}, {name} // {c})", np.where(a < 0, a, a // c)),
        (f"({name} == -1).long()", (a == -1).astype(np.int64)),
        (f"{name}.cumsum(-1)", a.cumsum(-1, dtype=np.int64)) if a.ndim else (f"{name} + 0", a + 0),
        (f"torch.zeros_like({name})", np.zeros(a.shape, a.dtype)),
    )
    keeps = not (code.startswith(("(", "torch.zeros")) or "cumsum" in code)
    reads = not code.startswith("torch.zeros")
    value = np.asarray(value).astype(a.dtype) if keeps else value
    p.new(code, value, *([name] if reads else []))


def combine(draw, p):
    """Ids joined with constants or other ids, or made from sizes and tables."""
    name = ids_of(draw, p)
    a, c = p.values[name], draw(st.integers(1, 4))
    rows = p.values["rows"]
    options = [
        ("req[rows]", p.values["req"][rows]),
        (f"req[rows, :{c}]", p.values["req"][rows, :c]),
        ("torch.tensor([3, -1, 5])", np.array([3, -1, 5])),
        (f"torch.arange({name}.numel()) + {c}", np.arange(a.size) + c),
    ]
    if a.ndim == 1:
        zeros = np.zeros(c, np.int64)
        other = one_of(draw, "loc", "loc2")
        options += [
            (
                f"torch.cat([{name}.long(), torch.zeros({c}, dtype=torch.int64)])",
                np.concatenate([a.astype(np.int64), zeros]),
            ),
            (f"torch.cat([{name}, {other}])", np.concatenate([a, p.values[other]])),
            (
                f"torch.nn.functional.pad({name}, (0, {c}), value=-1)",
                np.concatenate([a, zeros.astype(a.dtype) - 1]),
            ),
        ]
    if a.ndim and a.size:
        first = -(-len(a) // 2)
        options.append((f"{name}.chunk(2)[0]", a[:first]))
        options.append((f"{name}.unbind(0)[-1]", a[-1, ...]))
    mapping = one_of(draw, "m0", "m1")
    if not a.size or (a.min() >= -1 and a.max() < len(p.values[mapping])):
        options.append((f"{mapping}[{name}.long()]", p.values[mapping][a.astype(np.int64)]))
    code, value = one_of(draw, *options)
    reads = name in code and ".numel()" not in code
    p.new(code, value, *([name] if reads else []))


def from_activations(draw, p):
    scores = "(x[:6].reshape(6, -1) @ x[:8].reshape(8, -1).t())"
    x = p.values["x"]
    want = (x[:6].reshape(6, -1) @ x[:8].reshape(8, -1).T).argmax(-1)
    p.activations = True
    p.new(f"{scores}.argmax(-1)", want)


def rows_for(draw, p, name, rank):
    """(source, array): as many rows as `name` has ids, with a row's shape of `rank` dimensions."""
    n, c = len(p.values[name]), draw(st.integers(0, 8))
    count = one_of(draw, str(n), f"{name}.shape[0]")
    value, code = p.values["x"][:n], f"x[:{count}]"
    code, value = one_of(
        draw, (f"({code} + {c})", value + c), (f"{code} * -2", value * -2), (code, value)
    )
    if rank == 1:
        return f"({code})[:, 0]", value[:, 0]
    return code, value


def store(draw, p, name=None):
    name = name or ids_of(draw, p)
    ids = p.values[name]
    if ids.ndim != 1 and ids.ndim:
        ids = ids.reshape(-1)
        if not may_store(ids, ROWS):
            return
        name = p.new(f"{name}.reshape(-1)", ids, name)
    if len(ids.reshape(-1)) > 60 or not may_store(ids, ROWS):
        return
    first = draw(st.integers(0, len(p.caches) - 1))
    pairs = [first]
    shape = p.caches[first][1].shape
    if shape[1:] == p.values["x"].shape[1:]:  # [rows, H, D]
        same = [i for i, c in enumerate(p.caches) if c[1].shape[1:] == shape[1:] and i != first]
        if same:
            pairs.append(one_of(draw, *same))
    slots = ids.clip(0, None)
    operands, scale = [], None
    float8 = [str(p.bases[p.caches[i][2]][1]).endswith("e4m3fn") for i in pairs]
    if all(float8) and draw(st.booleans()):
        scale = 0.5
    for i in pairs:
        array = p.caches[i][1]
        code, value = rows_for(draw, p, name, array.ndim - 1)
        if array.shape[1:] == (1, p.values["x"].shape[-1]):
            code, value = f"({code})[:, :1]", value[:, :1]
        operands.append((code, value))
    plain = draw(st.integers(0, 4)) == 0 and not any(float8)
    for i, (code, value) in zip(pairs, operands, strict=True):
        p.caches[i][1][slots] = value if scale is None or plain else value / scale
        if plain:
            dtype = p.bases[p.caches[i][2]][1]
            p.lines.append(f"{p.caches[i][0]}[{name}.clamp_min(0)] = ({code}).to({dtype})")
    p.kept.add(name)
    if plain:
        return
    sources = [p.caches[i][0] for i in pairs]
    rows = [code for code, _ in operands]
    if len(pairs) == 2:
        tail = "" if scale is None else f", {scale}, {scale}"
        p.lines.append(f"store_kv({', '.join(sources + rows)}, {name}{tail})")
    else:
        tail = "" if scale is None else f", {scale}"
        p.lines.append(f"store_latent({sources[0]}, {rows[0]}, {name}{tail})")


def read(draw, p):
    """Rows of a cache as they are now; never the sink."""
    source, array, _ = one_of(draw, *p.caches)
    name = ids_of(draw, p)
    ids = p.values[name].clip(1, ROWS - 1).astype(np.int64)
    p.new(f"{source}.float()[{name}.long().clamp(1, {ROWS - 1})] * 2", array[ids] * 2, name)
    p.outputs.append(p.registers.pop())  # these are no ids


def edit(draw, p):
    """A write to an index input, or to a register, in place."""
    name = one_of(draw, "m0", "m0", "m1", "pages", "loc", "loc2", "req", *p.registers[-4:])
    a, c = p.values[name], draw(st.integers(0, 2))
    if not a.flags.writeable or 0 in a.strides or a.dtype not in (np.int32, np.int64):
        return
    kind = one_of(draw, "index", "slice", "slice copy", "add", "copy", "clamp")
    if kind == "index" and a.ndim == 1:
        by = one_of(draw, "loc", "loc2", *p.registers[-3:])
        ids = p.values[by].astype(np.int64)
        if ids.size and (ids.min() < -len(a) or ids.max() >= len(a)):
            return
        a[ids] = c
        if by in p.translated:
            p.translated.update(p.inputs)
        p.write(f"{name}[{by}.long()] = {c}", name)
    elif kind == "slice" and a.ndim:
        a[2:10] = c
        p.write(f"{name}[2:10].fill_({c})", name)
    elif kind == "slice copy" and a.ndim == 1 and len(a) > 3:
        a[:2] = a[2:4].copy()
        p.write(f"{name}[:2] = {name}[2:4].clone()", name)
    elif kind == "copy":
        by = one_of(draw, "loc", "loc2", "table", *p.registers[-5:])
        if p.values[by].shape == a.shape and not np.may_share_memory(p.values[by], a):
            a[...] = p.values[by].copy()
            if by in p.translated:
                p.translated.update([*p.inputs, name])
            p.write(f"{name}.copy_({by})", name)
    elif kind == "clamp":
        np.clip(a, None, 30 + c, out=a)
        p.write(f"{name}.clamp_(max={30 + c})", name)
    elif kind == "add" and name not in ("m0", "m1", "pages"):
        a += c
        p.write(f"{name}.add_({c})", name)


def branch(draw, p):
    """A `torch.cond` with a translation in each branch."""
    name = ids_of(draw, p)
    ids = p.values[name]
    want = translate("token", p.values["m0"], ids)
    if want is None or ids.dtype not in (np.int32, np.int64):
        return
    p.marked += 2
    p.chained |= not p.translated.isdisjoint((name, "m0"))
    p.branches = True
    yes, no = "lambda m, i: translate_loc(m, i) + 1", "lambda m, i: translate_loc(m, i) * 2"
    want = want + 1 if p.values["flag"] else want * 2
    p.new(f"torch.cond(flag, {yes}, {no}, (m0, {name}))", want, name)


@st.composite
def programs(draw, most=8):
    p = Program()
    draw_inputs(draw, p)
    kinds = [views, views, plain_translation, plain_translation, parts, layers, layers, layers]
    kinds += [arithmetic, combine, store, read]
    if one_of(draw, True, False):
        kinds += [edit, edit]
    if draw(st.integers(0, 4)) == 0:
        kinds.append(from_activations)
    if draw(st.integers(0, 9)) == 0:
        kinds.append(branch)
    for _ in range(draw(st.integers(1, most))):
        one_of(draw, *kinds)(draw, p)
    # Whatever nothing else needs is returned, so that no translation is dead code.
    p.outputs += [name for name in p.registers if name not in p.kept]
    if p.registers:
        p.outputs += draw(st.lists(st.sampled_from(p.registers), max_size=3))
    if draw(st.booleans()):
        p.outputs.append(one_of(draw, "loc", "m0", "loc2"))
    return p
