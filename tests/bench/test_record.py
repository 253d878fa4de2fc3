"""Results are kept row by row, and a run goes on where another one stopped."""

import json

import pytest
import torch

from swa_compile.bench.plan import Job, carry_out, target_jobs
from swa_compile.bench.record import Record, RecordError, about

from .rows import ABOUT, step_row


def job(name, log, row=None, variants=()):
    def run(say):
        say("running")
        log.append(name)
        if isinstance(row, BaseException):
            raise row
        return row or {"figure": 1}

    return Job(name, run, variants)


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path):
    path, log = tmp_path / "new" / "results.json", []
    record = Record(dict(ABOUT), path)
    jobs = [job("one", log), job("two", log, row=KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        carry_out(jobs, record, say=lambda _: None)
    data = json.loads(path.read_text())
    assert data["schema"] == 1 and set(data["rows"]) == {"one"}
    assert data["rows"]["one"]["figure"] == 1 and "seconds" in data["rows"]["one"]
    assert list(path.parent.iterdir()) == [path]

    again = Record.continued(path, dict(ABOUT))
    carry_out([job("one", log), job("two", log)], again, say=lambda _: None)
    assert log == ["one", "two", "two"]
    assert set(Record.read(path).rows) == {"one", "two"}


def test_a_row_that_failed_is_kept_and_tried_again(tmp_path):
    record, log = Record(dict(ABOUT), tmp_path / "r.json"), []
    carry_out([job("a", log, ValueError("no\nmore")), job("b", log)], record, say=lambda _: None)
    assert record.rows["a"]["error"] == "ValueError: no"
    assert log == ["a", "b"]
    carry_out([job("a", log), job("b", log)], record, say=lambda _: None)
    assert log == ["a", "b", "a"] and "error" not in record.rows["a"]


@pytest.mark.parametrize(
    ("row", "wanted", "again"),
    [
        (step_row(), ("swa", "eager"), False),
        (step_row(eager=None), ("swa", "eager"), True),
        (step_row(), ("swa", "new"), True),
    ],
)
def test_a_row_with_a_wrong_or_a_missing_variant_is_measured_again(row, wanted, again):
    record, log = Record(dict(ABOUT)), []
    record.rows["steps/x"] = row
    carry_out([job("steps/x", log, variants=wanted)], record, say=lambda _: None)
    assert log == ["steps/x"] * again


def test_a_budget_starts_nothing_that_would_pass_it(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("swa_compile.bench.plan.time.perf_counter", lambda: clock[0])

    def taking(name, seconds):
        def run(say):
            clock[0] += seconds
            return {}

        return Job(name, run)

    record = Record(dict(ABOUT))
    jobs = [taking("a", 30), taking("b", 40), taking("c", 5), taking("d", 5)]
    assert carry_out(jobs, record, budget=100, say=lambda _: None) == ["c", "d"]
    assert list(record.rows) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("{", "is no JSON"),
        ('{"schema": 99}', "no results of this version"),
        ("[]", "no results of this version"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(tmp_path, content, words):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecordError, match=words):
        Record.read(path)


def test_results_of_another_card_are_not_added_to(tmp_path):
    path = tmp_path / "results.json"
    Record(dict(ABOUT), path).add("a", {})
    with pytest.raises(RecordError, match="device Abacus 9000, and here it is Slide rule"):
        Record.continued(path, {**ABOUT, "device": "Slide rule"})


def test_what_was_measured_on_stands_beside_the_figures():
    told = about(torch.device("cpu"), runs=3)
    assert told["torch"] == torch.__version__ and told["options"] == {"runs": 3}
    assert {"triton", "python", "device", "date", "swa_compile"} <= set(told)


def test_the_plan_names_every_row_once_and_the_table_of_the_targets_first(monkeypatch):
    names = [job.name for job in target_jobs(torch.device("cuda"), 60)]
    assert len(set(names)) == len(names)
    assert names[0] == "steps/ref24/B64/W128/C128"
    kinds = {name.partition("/")[0] for name in names}
    assert kinds == {"steps", "stores", "prologue", "start", "depth", "sizes", "passes"}
    for batch, window in [(1, 128), (64, 128), (256, 1024), (128, 4096)]:
        assert f"steps/ref24/B{batch}/W{window}/C{window}" in names[:4]
