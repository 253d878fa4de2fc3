"""What made a dump: versions and the moment, so that two dumps can be told apart."""

from __future__ import annotations

import importlib.metadata
import platform
from datetime import datetime, timezone

import torch


def provenance() -> dict[str, str]:
    """Versions of what decides the code, and the time in UTC."""
    found = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in ("swa-compile", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
