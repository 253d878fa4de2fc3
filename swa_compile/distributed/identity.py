"""Whether all ranks run the same thing: versions, passes, options and reports, compared."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from swa_compile.distributed.groups import gather_rows, global_ranks
from swa_compile.options import Options
from swa_compile.passes import GraphReport, pipeline

_PACKAGES = ("swa-compile", "torch", "triton")

# Where a dump lies and where the code came from may differ: they change nothing that runs.
_LOCAL = frozenset({"dump", "from_cache"})
_SHOWN = 20


class RankMismatch(RuntimeError):
    """Ranks that ought to run the same forward do not; the message says which, and in what.

    Attributes:
        differences: what differs (e.g. "options.strict", "graph 0.translation_nodes") -> the values
            found, each with the ranks that have it.
    """

    def __init__(self, differences: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        self.differences = differences
        lines = [f"ranks differ in {len(differences)} thing{'s' * (len(differences) != 1)}:"]
        for name, values in list(differences.items())[:_SHOWN]:
            found = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in values.items())
            lines.append(f"  {name}: {found}")
        if len(differences) > _SHOWN:
            lines.append(f"  and {len(differences) - _SHOWN} more")
        super().__init__("\n".join(lines))


def verify_ranks(
    reports: Sequence[GraphReport] = (),
    options: Options | Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Raise on every rank of `group` unless all of them compiled the same way.

    Ranks that run unlike graphs may issue unlike collectives, which hangs or, worse, does not.
    Compared are the versions of Python, torch, triton and this package, the passes and operators
    (their sources and marks), `options`, and `reports` field by field; not where dumps lie, which
    rank took its code from a compile cache, nor lines of the model's source. A collective: call it
    on every rank, after compiling and outside of compiled code. While all agree it costs one
    all-gather of 32 bytes per rank.

    Args:
        reports: of the graphs to compare, from `collect()`. Stages of a pipeline differ: give the
            group of one stage's ranks, or no reports.
        options: what the backend was given.
        group: the ranks to compare; None for all.

    Returns:
        The identity they share, a hexadecimal SHA-256.

    Raises:
        RankMismatch: naming the ranks that differ and what differs.
        OptionError: for options that are unknown or refused.
    """
    own = identity(reports, options)
    text = json.dumps(own, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    rows = gather_rows(torch.frombuffer(bytearray(digest), dtype=torch.uint8), group)
    if bool((rows == rows[0]).all()):
        return digest.hex()
    # All ranks have seen all digests, so all of them come here, or none.
    texts: list[Any] = [None] * len(rows)
    dist.all_gather_object(texts, text, group=group)
    found = {rank: json.loads(t) for rank, t in zip(global_ranks(group), texts, strict=True)}
    raise RankMismatch(differences(found))


def identity(
    reports: Sequence[GraphReport] = (), options: Options | Mapping[str, Any] | None = None
) -> dict[str, str]:
    """What `verify_ranks` compares, as flat names and values: "options.strict" -> "False"."""
    chosen = Options.of(options)
    found = {"versions.python": platform.python_version()}
    for package in _PACKAGES:
        found[f"versions.{package}"] = _version(package)
    found["passes"] = pipeline().uuid()[:16]
    for field in fields(chosen):
        if field.name == "dump_dir":
            continue
        value = getattr(chosen, field.name)
        if isinstance(value, Mapping):
            for key, item in sorted(value.items()):
                found[f"options.{field.name}.{key}"] = _stable(item)
        else:
            found[f"options.{field.name}"] = _stable(value)
    found["graphs"] = str(len(reports))
    for i, report in enumerate(reports):
        data = {name: v for name, v in report.to_dict().items() if name not in _LOCAL}
        found |= {f"graph {i}.{name}": value for name, value in _flat(data)}
    return found


def differences(
    identities: Mapping[int, Mapping[str, str]],
) -> dict[str, dict[str, list[int]]]:
    """What differs between ranks: name -> value -> the ranks that have it."""
    names: dict[str, None] = {}
    for own in identities.values():
        names |= dict.fromkeys(own)
    found: dict[str, dict[str, list[int]]] = {}
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, own in identities.items():
            values.setdefault(own.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            found[name] = values
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """`[0, 2, 3, 4]` as "ranks 0, 2-4"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def _flat(data: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of JSON-like `data`, each with its path; an empty container is a leaf."""
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(data, (list, tuple)) and data:
        for i, value in enumerate(data):
            yield from _flat(value, f"{prefix}[{i}]")
    elif prefix.endswith((".source", ".call")):
        return  # a tree may lie elsewhere, and a rank that took its code from a cache may know none
    else:
        yield prefix, str(data)


def _stable(value: Any) -> str:
    """Text that is the same in every process: no addresses."""
    uuid = getattr(value, "uuid", None)
    if callable(uuid):
        return f"{type(value).__qualname__} {uuid()}"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    return repr(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
