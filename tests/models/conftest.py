"""The table of families and checks: `pytest tests/models --model-table`."""

from importlib.util import find_spec

import pytest


class WithoutTransformers(pytest.Module):
    """A test module that says why it cannot be imported."""

    def collect(self):
        pytest.skip("transformers is not installed (the extra [hf])")


def pytest_pycollect_makemodule(module_path, parent):
    if find_spec("transformers") is None:
        return WithoutTransformers.from_parent(parent, path=module_path)
    return None


def pytest_addoption(parser):
    parser.addoption(
        "--model-table",
        action="store_true",
        help="run every family, and print which passed which check, as Markdown",
    )


@pytest.fixture(autouse=True)
def _one_thread():
    """Layers this small are done before a second thread has woken up."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--model-table", default=False):
        return
    rows = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            cells = dict(report.user_properties)
            if "family" in cells and report.when == "call":
                rows[cells.pop("family")] = cells
    if not rows:
        return
    columns = list(next(iter(rows.values())))
    terminalreporter.write_line("")
    for line in [["family", *columns], ["---"] * (len(columns) + 1)]:
        terminalreporter.write_line("| " + " | ".join(line) + " |")
    for family in sorted(rows):
        line = [family, *(str(rows[family].get(column, "not run")) for column in columns)]
        terminalreporter.write_line("| " + " | ".join(line) + " |")
