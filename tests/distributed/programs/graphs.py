"""What a compiled graph holds, read off its dump."""

import re
from pathlib import Path

# A call of FX code is assigned; comments quote the model's own call. Inductor writes in place.
_COLLECTIVE = re.compile(
    r"^ *(?!#)(?:[^#\n]* = )?torch\.ops\._c10d_functional\.(?!wait_tensor)(\w+?)_?(?:\.default)?\(",
    re.MULTILINE,
)


def collectives(report):
    """The collectives of a graph in order, stage by stage: {"00-functional.py": [...], ...}.

    From AOTAutograd's graph on: Dynamo's calls them by other names.
    """
    folder = Path(report.dump)
    return {
        file.name: _COLLECTIVE.findall(file.read_text()) for file in sorted(folder.glob("0*.py"))
    }


def plain(reports):
    """Reports as data that can be sent to the test's process."""
    return [report.to_dict() for report in reports]
