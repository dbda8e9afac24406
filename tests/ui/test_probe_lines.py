"""What a probe says in a terminal about calls that it could not time."""

from __future__ import annotations

from stepscope.records.hardware import OUT_OF_TIME, UnprobedOperator
from stepscope.ui.terminal.measurements import _untimed_lines


def unprobed(name: str, share: float, why: str, mode: str = "") -> UnprobedOperator:
    return UnprobedOperator(name=name, shapes="[[4,8]]", mode=mode, share=share, why=why)


def test_a_call_has_one_line_for_all_precisions_and_small_ones_share_one() -> None:
    rows = [
        unprobed("aten::lstm", 0.8, "no"),
        unprobed("aten::lstm", 0.8, "no", "bf16"),
        unprobed("aten::svd", 0.1, "not in bf16", "bf16"),
        unprobed("aten::to", 0.0001, "no"),
        unprobed("aten::add", 0.0002, "no"),
        unprobed("aten::mm", 0.05, OUT_OF_TIME),
    ]
    lines = list(_untimed_lines(rows))
    assert [line.partition(":")[0] for line in lines] == [
        "not timed",
        "not timed in bf16",
        "not timed",
        "1 call (5.0% of the operators' time)",
    ]
    assert "aten::lstm 4×8 (80% of the operators): no" in lines[0]
    assert "2 other calls" in lines[2]
