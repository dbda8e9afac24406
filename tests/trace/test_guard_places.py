"""Where a guard that failed stands in the source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from stepscope.explain.compiled.summary import list_recompiled
from stepscope.trace.run_folder.compiler_record import COMPILER, read_compiler_record

if TYPE_CHECKING:
    from pathlib import Path

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
