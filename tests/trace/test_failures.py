"""A failed command: which exception came first, and where."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from stepscope.measure.processes import describe_exception
from stepscope.records.folders import processes_file
from stepscope.trace.run_folder.run_state import find_failure

if TYPE_CHECKING:
    from pathlib import Path


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
