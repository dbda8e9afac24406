"""Why and where graphs break, as compiler.jsonl tells it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stepscope.trace.run_folder.compiler_record import COMPILER, read_compiler_record

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.compiled import GraphBreak

CALLS, LOGS = ["model.py", 702, "forward"], ["loss.py", 46, "loss_function"]


def read(folder: Path, *breaks: dict[str, Any]) -> tuple[GraphBreak, ...]:
    lines = [json.dumps({"what": "break", **one}) for one in breaks]
    (folder / COMPILER).write_text("\n".join(lines))
    record, notes = read_compiler_record(folder)
    assert record is not None
    assert not notes
    return record.breaks


def test_a_call_that_breaks_inside_has_the_reason_and_line_of_that_break(tmp_path: Path) -> None:
    why = "logging is not supported\n  Hint: leave it out"
    (only,) = read(
        tmp_path,
        {"compile_id": "0/0", "reason": why, "frames": [["a.py", 1, "wrap"], CALLS, LOGS]},
        {"compile_id": "1/0", "reason": "step_unsupported", "frames": [CALLS]},
        {"compile_id": "2/0", "reason": why, "frames": [LOGS]},
    )
    assert (only.reason, only.hint) == ("logging is not supported", "leave it out")
    assert only.place is not None
    assert (only.place.file, only.place.line) == ("loss.py", 46)
    assert only.regions == ("0/0", "1/0", "2/0")


def test_without_such_a_break_the_line_is_named_in_plain_words(tmp_path: Path) -> None:
    (only,) = read(tmp_path, {"compile_id": "1/0", "reason": "step_unsupported", "frames": [CALLS]})
    assert only.reason == "dynamo cannot trace this line"
    assert only.place is not None
    assert only.place.line == 702
