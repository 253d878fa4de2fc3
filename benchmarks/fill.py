"""Put the tables of a file of results into docs/benchmarks.md, in place of those that stand there.

python benchmarks/fill.py results.json [docs/benchmarks.md]

Refuses what is no figure: a run on a CPU, or a `--quick` one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from swa_compile.bench.record import Record, RecordError
from swa_compile.bench.render import markdown

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def fill(document: str, tables: str) -> str:
    """`document` with `tables` between its two marks.

    Raises:
        ValueError: it does not have them, in this order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} with a {END} behind it")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    beside = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else beside
    try:
        record = Record.read(Path(sys.argv[1]))
        if not record.about.get("cuda"):
            raise ValueError(f"{sys.argv[1]} is of a CPU; the page has the figures of a GPU")
        runs = record.about.get("options", {}).get("runs", 0)
        if runs < 50:
            raise ValueError(f"{sys.argv[1]} has {runs} samples of each; a figure has 50")
        tables = markdown(record)
        target.write_text(fill(target.read_text(encoding="utf-8"), tables), encoding="utf-8")
    except (OSError, ValueError, RecordError) as error:
        sys.exit(f"fill.py: {error}")


if __name__ == "__main__":
    main()
