"""Reading the Python code that Inductor generates around its kernels.

Written against torch 2.11 to 2.14. Where a later one writes it in another way, a figure of a report
is missing, or a quicker way is not taken; no result depends on it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from swa_compile.passes.report import Cache

_ALLOCATION = re.compile(r"(\w+) = empty_strided\w*\(\(([^()]*)\), \([^()]*\), torch\.(\w+)")
_ALIAS = re.compile(r"^\s*(\w+) = (?:reinterpret_tensor\()?(\w+)[,;]", re.MULTILINE)
_BUFFER = re.compile(r"^\s*(buf\d+) = ", re.MULTILINE)
_PARTITION = re.compile(r"^\s*def (partition_\d+)\(", re.MULTILINE)
_CALL = re.compile(r"^\s*(?:\w+ = )?(?P<callee>[\w.]+)\((?P<args>.*)\)$", re.MULTILINE)
# The last gives back what is aligned; schedules are made of aligned inputs alone.
_NO_KERNELS = frozenset(
    {
        "assert_alignment",
        "assert_size_stride",
        "assert_size_stride_grouped",
        "assert_tensor_metadata",
        "reinterpret_tensor",
        "copy_if_misaligned",
    }
)
_PIECE = re.compile(r"^.*\bself\.partitions\[(\d+)\]\(.*$", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^\w", re.MULTILINE)
_NAME = re.compile(r"\b\w+\b")


def cache_copies(code: str, caches: Sequence[Cache]) -> int:
    """How many copies of `caches` the generated `code` makes.

    A copy is a buffer that the code allocates, that has as many elements of the same dtype as a
    cache, and that stands in a call of a kernel together with that cache (or with another of its
    kind): a buffer of the size alone may be anything.
    """
    kinds: dict[tuple[Any, str], set[str]] = {}
    for cache in caches:
        kind = (_extent(tuple(map(str, cache.shape))), cache.dtype)
        kinds.setdefault(kind, set()).add(cache.name)
    allocated = {}
    for name, sizes, dtype in _ALLOCATION.findall(code):
        shape = tuple(part.strip() for part in sizes.split(",") if part.strip())
        allocated[name] = (_extent(shape), dtype)
    if not any(kind in kinds for kind in allocated.values()):
        return 0
    origin: dict[str, str] = {}
    for new, old in _ALIAS.findall(code):
        origin[new] = origin.get(old, old)
    copies = set()
    for args in _kernel_arguments(code):
        names = {origin.get(name, name) for name in _NAME.findall(args)}
        for name in names & allocated.keys():
            copies |= {name} if names & kinds.get(allocated[name], set()) else set()
    return len(copies)


def mapping_kernels(code: str, mappings: Sequence[str]) -> int:
    """How many kernel calls in the generated `code` take one of the graph inputs `mappings`.

    Inductor keeps the names of graph inputs, so a call that reads one names it.
    """
    wanted = set(mappings)
    return sum(not wanted.isdisjoint(names) for names in _called_with(code))


def late_mapping_kernels(code: str, mappings: Sequence[str], caches: Sequence[str]) -> int:
    """How many of those calls stand behind a call that takes one of the graph inputs `caches`."""
    late, in_layers = 0, False
    for names in _called_with(code):
        late += in_layers and not names.isdisjoint(mappings)
        in_layers = in_layers or not names.isdisjoint(caches)
    return late


def _called_with(code: str) -> Iterator[set[str]]:
    """The names in the arguments of each kernel call, in the order of the calls.

    Pieces have the names of the whole for what they are given.
    """
    body = _PIECE.sub(lambda call: _function(code, f"partition_{call[1]}"), _function(code, "call"))
    for args in _kernel_arguments(body):
        yield set(_NAME.findall(args))


def _function(code: str, name: str) -> str:
    """The text of a function or method of `code`, to the end where there is none."""
    start = max(code.find(f"def {name}("), 0)
    end = _TOP_LEVEL.search(code, code.find("\n", start) + 1)
    return code[start : end.start() if end else None]


def _kernel_arguments(code: str) -> Iterator[str]:
    """The arguments of each call of a kernel in `code`."""
    for match in _CALL.finditer(code):
        if match["callee"] not in _NO_KERNELS:
            yield match["args"]


def partition_count(code: str) -> int | None:
    """How many pieces the generated `code` was cut into; None where it was not cut."""
    return len(_PARTITION.findall(code)) or None


class PiecesError(RuntimeError):
    """Code that was cut into pieces would compute something else than the graph."""


def check_pieces(code: str) -> None:
    """See that no piece of `code` makes a buffer that another one has made already.

    Raises:
        PiecesError: one does: what the other wrote there is lost.
    """
    maker: dict[str, str] = {}
    for piece in _PARTITION.findall(code):
        for name in dict.fromkeys(_BUFFER.findall(_function(code, piece))):
            if maker.setdefault(name, piece) != piece:
                raise PiecesError(
                    f"Inductor's code makes {name} in {maker[name]} and again in {piece}, so that "
                    "what the first wrote is lost; compile this model with cudagraphs='full' or "
                    "'off', which do not cut the code, and report this"
                )


def _extent(shape: tuple[str, ...]) -> int | tuple[str, ...]:
    """Elements, where all sizes are numbers: a copy may have another shape; else the sizes."""
    if not all(size.isdigit() for size in shape):
        return shape
    total = 1
    for size in shape:
        total *= int(size)
    return total


# What Inductor's code does between the pieces without launching anything.
_HARMLESS = _NO_KERNELS | {
    "args.clear",
    "get_raw_stream",
    "torch.cuda._DeviceGuard",
    "torch.cuda.set_device",
}
_OPERATOR = "torch.ops."
_CALLED_PIECE = re.compile(r"self\.partitions\[(\d+)\]")
_DOING_MORE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda, ast.comprehension)


def calls_around_pieces(code: str) -> list[int | str] | None:
    """What the code that calls the pieces calls, in order: pieces by number, operators by name.

    None where it was not cut, or where it does anything else that could have an effect: launches a
    kernel of its own, allocates for one, reads a number from a tensor, branches on more than an
    assertion.
    """
    if not _PARTITION.search(code):
        return None
    call = _method_around_pieces(code)
    if call is None or not all(map(_is_plain, call.body)):
        return None
    return _pieces_and_operators(call)


def pieces_and_operators(code: str) -> list[int | str]:
    """The same, whatever else that code does; nothing where it calls no piece."""
    call = _method_around_pieces(code)
    calls = [] if call is None else _pieces_and_operators(call)
    return calls if any(isinstance(name, int) for name in calls) else []


def _method_around_pieces(code: str) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # ValueError: null bytes, before Python 3.12
        return None
    runner = next(
        (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Runner"), None
    )
    methods = [n for n in runner.body if isinstance(n, ast.FunctionDef)] if runner else []
    return next((method for method in methods if method.name == "call"), None)


def _pieces_and_operators(method: ast.FunctionDef) -> list[int | str]:
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    calls.sort(key=_end)  # arguments are called ahead of what they are handed to
    found: list[int | str] = []
    for call in calls:
        name = ast.unparse(call.func)
        if piece := _CALLED_PIECE.fullmatch(name):
            found.append(int(piece[1]))
        elif name.startswith(_OPERATOR):
            found.append(name.removeprefix(_OPERATOR))
    return found


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _is_plain(statement: ast.stmt) -> bool:
    """Whether `statement` is of a known kind."""
    match statement:
        case ast.With(items=items, body=body):
            return all(_is_known(i.context_expr) for i in items) and all(map(_is_plain, body))
        case ast.If(body=[ast.Raise()], orelse=[]):  # an assertion on sizes, which are the bucket's
            return _is_known(statement.test)
        case ast.Assign(targets=[ast.Name() | ast.Tuple()], value=value):
            return _is_known(value)
        case ast.Return(value=value) | ast.Expr(value=value):
            return value is None or _is_known(value)
        case ast.Delete() | ast.Pass():
            return True
    return False


def _is_known(expression: ast.expr) -> bool:
    """Whether all that `expression` does is known: hand tensors around, call pieces, operators."""
    for node in ast.walk(expression):
        if isinstance(node, _DOING_MORE):
            return False
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            piece = _CALLED_PIECE.fullmatch(name)
            if not (piece or name.startswith(_OPERATOR) or name in _HARMLESS):
                return False
        elif isinstance(node, ast.Subscript) and not _CALLED_PIECE.fullmatch(ast.unparse(node)):
            return False  # of a tensor, that copies or views
    return True
