"""The lists of systems and faults are complete: each row has a scenario, a test, or a reason."""

from .rows import REASONS, ROOT, TESTS, A, B, elsewhere, functions, scenario_rows


def test_every_row_has_a_scenario_or_a_test_or_a_reason():
    open_rows = [row for row, _, checked in elsewhere() if checked == "NOT CHECKED"]
    assert not open_rows


def test_scenarios_tests_and_reasons_name_rows_of_the_lists():
    assert scenario_rows() | set(TESTS) | set(REASONS) <= set(A) | set(B)


def test_a_row_with_a_reason_is_checked_by_nobody():
    assert not set(REASONS) & (scenario_rows() | set(TESTS))


def test_the_tests_that_rows_name_exist():
    missing = []
    for name in [name for names in TESTS.values() for name in names]:
        path, _, test = name.partition("::")
        file = ROOT / "tests" / path
        if not file.is_file() or test not in [function.name for function in functions(file)]:
            missing.append(name)
    assert not missing


def test_the_table_shows_who_checks_the_other_rows():
    lines = {row: checked for row, _, checked in elsewhere()}
    assert lines["A26"].startswith("needs CUDA graph replay")
    assert lines["B54"].startswith("tests/passes/test_hoist.py::")
    assert "A1" not in lines
