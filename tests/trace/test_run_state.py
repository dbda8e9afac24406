"""What a run folder says of its own end: closed, still running, killed, restarted, cut anywhere."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stepscope
from stepscope.errors import NotCapturedError
from stepscope.measure.processes import describe_exception
from stepscope.records.folders import ProcessIdentity, process_state, processes_file, this_process
from stepscope.trace.run_folder.run_state import find_failure, run_notes

if TYPE_CHECKING:
    from pathlib import Path

ME = this_process()
GONE = replace(ME, started_ticks=(ME.started_ticks or 0) + 1)


def folder(tmp_path: Path, process: ProcessIdentity = GONE, **record: Any) -> Path:
    run = {"schema": 1, "status": "running", "process": asdict(process), "signals": [], **record}
    (tmp_path / "run.json").write_text(json.dumps(run))
    return tmp_path


def rank(run: Path, number: int = 0, process: ProcessIdentity = GONE, **facts: Any) -> None:
    place = run / f"rank-{number:05d}"
    place.mkdir()
    told = {"rank": number, "status": "running", "process": asdict(process), "problems": []}
    (place / "rank.json").write_text(json.dumps({**told, **facts}))


def said(run: Path) -> dict[str, str]:
    return {note.id: note.detail for note in run_notes(run)}


def test_a_process_is_known_by_more_than_its_number() -> None:
    assert process_state(ME) == "running"
    assert process_state(GONE) == "gone"
    assert process_state(replace(ME, boot="another")) == "restarted"
    assert process_state(replace(ME, host="another")) == "unknown"
    assert process_state(replace(ME, namespace="pid:[1]")) == "unknown"


def test_a_finished_run_has_no_notes(tmp_path: Path) -> None:
    run = folder(tmp_path, status="finished", exit_code=0)
    rank(run, status="finished")
    (run / "rank-00000" / "trace.json.gz").touch()
    assert said(run) == {}


def test_a_running_run_is_not_called_killed(tmp_path: Path) -> None:
    assert "still running" in said(folder(tmp_path, ME))["still-running"]


def test_a_killed_run_names_its_signals_and_the_state_of_its_ranks(tmp_path: Path) -> None:
    run = folder(tmp_path, signals=[{"signal": "SIGTERM", "unix": 1.0}])
    rank(run, 0, status="finished")
    rank(run, 1)
    rank(run, 2, ME)
    found = said(run)["not-closed"]
    assert "was killed (SIGKILL" in found
    assert "passed SIGTERM on" in found
    assert "1 of 3 ranks closed its files, 1 rank still runs, 1 rank ended without closing" in found


def test_a_restarted_machine_is_reported(tmp_path: Path) -> None:
    found = said(folder(tmp_path, replace(ME, boot="before")))
    assert "ended because the machine restarted" in found["not-closed"]


def test_a_process_on_another_machine_has_an_unknown_state(tmp_path: Path) -> None:
    found = said(folder(tmp_path, replace(ME, host="another")))
    assert "this machine cannot see whether it still runs" in found["not-closed"]


def test_a_rank_that_a_signal_ended_is_reported_with_the_signal(tmp_path: Path) -> None:
    run = folder(tmp_path, status="finished", exit_code=143)
    rank(run)
    assert "SIGTERM (exit code 143)" in said(run)["not-closed"]


def test_a_part_that_could_not_be_written_is_reported_with_its_reason(tmp_path: Path) -> None:
    run = folder(tmp_path, status="finished", exit_code=0)
    problems = ["saving the trace: no space left on device", "writing memory.json: file too large"]
    rank(run, status="finished", problems=problems)
    assert said(run)["missing-parts"] == (
        "rank 0 has no memory.json: file too large; "
        "rank 0 has no trace.json.gz: no space left on device"
    )


def test_a_run_folder_without_a_trace_is_not_enough_captured(tmp_path: Path) -> None:
    with pytest.raises(NotCapturedError, match="was killed"):
        stepscope.explain_job(folder(tmp_path))


@pytest.mark.parametrize("part", ["run.json", "rank-00000/rank.json"])
def test_files_cut_anywhere_cause_no_crash(tmp_path: Path, part: str) -> None:
    run = folder(tmp_path)
    rank(run)
    whole = (run / part).read_bytes()
    for end in range(0, len(whole), 7):
        (run / part).write_bytes(whole[:end])
        assert said(run)
    for content in (b"[]", b"null", b"\x00" * 4096, b'{"process": 3}', b'{"signals": [1]}'):
        (run / part).write_bytes(content)
        assert said(run)


def test_ranks_that_a_requeued_job_left_open_before_are_no_news(tmp_path: Path) -> None:
    run = folder(tmp_path, status="finished", exit_code=0)
    (run / "hosts").mkdir()
    for attempt, started in ((0, 100.0), (1, 300.0)):
        part = {"status": "finished", "attempt": attempt, "started_unix": started, "place": 0}
        (run / "hosts" / f"00000.{attempt + 1}.json").write_text(json.dumps(part))
    rank(run, 0, start_up={"began_unix_ns": 101_000_000_000})
    rank(run, 1, start_up={"began_unix_ns": 301_000_000_000}, status="finished")
    assert "not-closed" not in said(run)
    rank(run, 2, start_up={"began_unix_ns": 302_000_000_000})
    assert said(run)["not-closed"].startswith("1 of 2 ranks did not close")
    rank(run, 3, start_up="long ago")
    assert said(run)["not-closed"].startswith("2 of 3 ranks did not close")


# A failed command: which exception came first, and where.


def test_the_first_exception_is_the_cause(tmp_path: Path) -> None:
    file = processes_file(tmp_path, "a")
    file.parent.mkdir()
    first = {
        "event": "failed", "unix": 5.0, "exception": "ValueError: bad batch", "rank": 1,
        "file": "/home/me/train.py", "line": 33, "function": "main", "steps": 1200,
    }  # fmt: skip
    later = {"event": "failed", "unix": 6.0, "exception": "ChildFailedError"}
    lines = [{"event": "started", "unix": 1.0}, later, first]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert find_failure(tmp_path, 0) is None
    assert find_failure(tmp_path, None) is None
    failed = find_failure(tmp_path, 1)
    assert failed is not None
    assert failed.words == (
        "exit code 1 after step 1,200: rank 1: ValueError: bad batch (train.py:33 in main)"
    )


def test_a_killed_command_names_the_signal(tmp_path: Path) -> None:
    failed = find_failure(tmp_path, 137)
    assert failed is not None
    assert failed.words == "SIGKILL (exit code 137)"


def test_an_exceptions_place_is_the_users_line() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        words, place = describe_exception(error, sys.exc_info()[2])
    assert words.startswith("JSONDecodeError: ")
    assert place is not None
    assert place[0] == __file__


def test_an_exception_of_another_process_is_read_from_its_text() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/x/site-packages/torch/utils/data/_utils/fetch.py", line 52, in fetch\n'
        '  File "/home/me/data.py", line 7, in __getitem__\n'
        "KeyError: 'no such sample'\n"
    )
    words, place = describe_exception(KeyError(text).__class__.__base__(text), None)
    assert words == "KeyError: 'no such sample'"
    assert place == ("/home/me/data.py", 7, "__getitem__")


@pytest.mark.parametrize("code", [1, 7])
def test_without_an_exception_the_exit_code_remains(tmp_path: Path, code: int) -> None:
    failed = find_failure(tmp_path, code)
    assert failed is not None
    assert failed.words == f"exit code {code}"
