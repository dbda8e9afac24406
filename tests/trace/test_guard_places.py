"""Where a guard that failed stands in the source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stepscope.explain.compiled.summary import list_recompiled
from stepscope.trace.run_folder.compiler_record import COMPILER, read_compiler_record

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.compiled import GraphBreak

OF_THE_SCRIPT = (
    "3/0: ___stack2 == 0.019     # k = int(h.mean().item())  # train.py:18 in resume\n"
    "User stack trace:\n"
    '  File "/home/me/train.py", line 18, in torch_dynamo_resume_in_forward_at_18\n'
    "    k = int(h.mean().item())\n"
)
OF_TORCH = "3/1: ___stack2 == 0.021  # (_dynamo/output_graph.py:3375 in remove_graphargs)"


def test_a_line_of_torchs_own_is_no_place_of_the_script(tmp_path: Path) -> None:
    lines = [
        {"what": "compilation", "compile_id": f"3/{number}", "recompile_reason": reason}
        for number, reason in enumerate((None, OF_THE_SCRIPT, OF_TORCH))
    ]
    (tmp_path / COMPILER).write_text("\n".join(map(json.dumps, lines)))
    record, _ = read_compiler_record(tmp_path)
    assert record is not None
    assert record.compilations[2].guard_place is None
    (function,) = list_recompiled(record.compilations)
    (guard,) = function.guards
    assert (guard.guard, guard.times) == ("___stack2", 2)
    assert guard.place is not None
    assert (guard.place.file, guard.place.line) == ("/home/me/train.py", 18)


# Why and where graphs break, as compiler.jsonl tells it.

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
