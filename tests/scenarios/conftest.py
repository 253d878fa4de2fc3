"""`pytest tests/scenarios --scenario-table`: what the passes did in each scenario."""

import json

from .rows import elsewhere

HEADER = ("scenario", "found", "nodes", "values", "left", "stores", "invariants", "graphs", "claim")


def pytest_addoption(parser):
    parser.addoption(
        "--scenario-table",
        action="store_true",
        help="print what the passes report for each scenario under swa_eager",
    )


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--scenario-table", default=False):
        return
    lines = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "scenario":
                row, claim, engine, graphs = json.loads(value)
                if engine == "swa_eager" and graphs:
                    lines[claim] = cells(row, claim, len(graphs), graphs[0])
    table = [HEADER, *sorted(lines.values(), key=by_row)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    terminalreporter.section("scenarios")
    for line in table:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        terminalreporter.write_line("  ".join(padded).rstrip())
    terminalreporter.section("rows without a scenario")
    for row, what, checked in elsewhere():
        terminalreporter.write_line(f"{row:<4} {what}: {checked}")


def by_row(line):
    """A2 ahead of A10."""
    row = line[0].split(",")[0]
    return row[0], int(row[1:]), line[-1]


def cells(row, claim, graphs, counts):
    left = " ".join([str(counts["left"]), *counts["refused"]])
    found, lowered = counts["stores"]
    numbers = (counts["found"], counts["nodes"], counts["values"])
    stores = f"{lowered}/{found}"
    claim = claim.removeprefix("test_").replace("_", " ")
    return (row, *map(str, numbers), left, stores, str(counts["invariants"]), str(graphs), claim)
