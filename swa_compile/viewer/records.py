"""The JSON files of a dump, read as what this version writes: nothing missing, nothing else.

A dump may be of another version, or edited, or cut off by what copied it. A key that is missing is
filled in, one that is not known is left out, and anything else is an error that names the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swa_compile.captures import Captures, Recorded, Skip
from swa_compile.passes import GraphReport, Refusal
from swa_compile.passes.reading import read_json, short_json
from swa_compile.passes.report import Cache, Value

# Examples: a list holds any number of its one item, a dict with the key ANY any keys, and None
# stands for any value.
ANY = "*"
_REPORT = GraphReport(
    values=[Value("", "", (), "", 0)],
    refused=[Refusal("", "", "", "")],
    caches=[Cache("", (), "")],
    collectives=[""],
    inputs={ANY: 0},
).to_dict()
# A size of a shape is a number or the name of one.
for _item in (*_REPORT["values"], *_REPORT["caches"]):
    _item["shape"] = [None]
CAPTURES_FORMAT = 1
_CAPTURES = {
    "format": CAPTURES_FORMAT,
    "time": "",
    **Captures(
        memory={ANY: 0},
        recorded={ANY: Recorded(pieces=(0,))},
        skipped=[Skip("")],
    ).to_dict(),
    "further_sizes": 0,
}


def read_report(folder: Path) -> dict[str, Any]:
    """`report.json` of `folder`; {} where there is none, or an empty one.

    Raises:
        ValueError: where it is no report.
    """
    return _read(folder / "report.json", _REPORT)


def read_captures(folder: Path) -> dict[str, Any]:
    """`captures.json` of `folder`; {} where there is none, or an empty one.

    Raises:
        ValueError: where it is no record of captures.
    """
    path = folder / "captures.json"
    found = _read(path, _CAPTURES)
    if found and found["format"] != CAPTURES_FORMAT:
        raise ValueError(
            f"{path} has format {found['format']}, and this version reads {CAPTURES_FORMAT}"
        )
    return found


def _read(path: Path, example: dict[str, Any]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = read_json(path)
        found: dict[str, Any] = _like(example, data, "all of it") if data != {} else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def _like(example: Any, data: Any, what: str) -> Any:
    """`data` with the keys of `example`; ValueError where it has values of other types."""
    if example is None:
        return data
    if not isinstance(data, type(example)):
        raise ValueError(f"{what} is {short_json(data)}")
    if isinstance(example, list):
        return [_like(example[0], item, f"an item of {what}") for item in data]
    if not isinstance(example, dict):
        return data
    if ANY in example:
        return {key: _like(example[ANY], item, f"{what}[{key!r}]") for key, item in data.items()}
    return {
        key: _like(part, data[key], f"'{key}'") if key in data else _nothing(part)
        for key, part in example.items()
    }


def _nothing(example: Any) -> Any:
    """What stands for a key that is missing."""
    return type(example)() if isinstance(example, (list, dict)) else example
