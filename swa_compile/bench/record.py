"""The file of results: written after every row, so that a run that is cut off keeps what it has.

{"schema": 1, "about": {...}, "rows": {"steps/ref24/B64/W128/C128": {...}, ...}}
"""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1

# Of these the whole file has to come from one: ratios of two machines are no figures.
_MUST_AGREE = ("torch", "triton", "device")

Row = dict[str, Any]


class RecordError(Exception):
    """A file of results that cannot be read or continued."""


class Record:
    """Rows by name, and what they were measured on.

    Args:
        about: see `about`.
        path: where `add` writes; None for nowhere.
    """

    def __init__(self, about: dict[str, Any], path: Path | None = None) -> None:
        self.about = about
        self.path = path
        self.rows: dict[str, Row] = {}

    @classmethod
    def read(cls, path: Path) -> Record:
        """The results in `path`.

        Raises:
            RecordError: it is no such file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RecordError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise RecordError(f"{path} is no JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise RecordError(f"{path} holds no results of this version (schema {SCHEMA})")
        record = cls(data["about"], path)
        record.rows = data["rows"]
        return record

    @classmethod
    def continued(cls, path: Path, about: dict[str, Any]) -> Record:
        """The results in `path`, to be added to; a new record where there is no such file.

        Raises:
            RecordError: the file is no record, or comes from another card or another torch.
        """
        if not path.exists():
            return cls(about, path)
        record = cls.read(path)
        for name in _MUST_AGREE:
            if record.about.get(name) != about.get(name):
                raise RecordError(
                    f"{path} was measured with {name} {record.about.get(name)}, and here it is "
                    f"{about.get(name)}: name another file"
                )
        return record

    def add(self, name: str, row: Row) -> None:
        """Keep `row`, and write the file."""
        self.rows[name] = {**row, "date": _now()}
        self.write()

    def write(self) -> None:
        """Write the file, in one piece or not at all."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        data = {"schema": SCHEMA, "about": self.about, "rows": self.rows}
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def of_kind(self, kind: str) -> dict[str, Row]:
        """The rows whose name starts with `kind` and a slash, or is `kind`."""
        return {
            name: row
            for name, row in self.rows.items()
            if name == kind or name.startswith(f"{kind}/")
        }


def about(device: torch.device, **options: Any) -> dict[str, Any]:
    """Versions, card and options: what belongs to every figure."""
    from swa_compile import __version__

    found: dict[str, Any] = {
        "swa_compile": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "date": _now(),
        "options": options,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["cuda"] = torch.version.cuda
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
