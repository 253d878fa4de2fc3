"""The table in docs/models.md is one of `--model-table`, of these families."""

from pathlib import Path

from swa_compile.hf import FAMILIES

from . import families

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()


def test_the_table_has_every_family_and_no_failure():
    table = TEXT.split("<!-- the table of `--model-table` -->")[1].split("<!-- end")[0]
    head, rule, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in table.strip().splitlines()
    ]
    assert head[0] == "family" and set(rule) == {"---"}
    assert [row[0] for row in rows] == families.EVERY
    assert set(FAMILIES) < {row[0] for row in rows}
    for row in rows:
        assert len(row) == len(head)
        assert not any("**" in cell or cell == "not run" for cell in row), row
