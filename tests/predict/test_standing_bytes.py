"""What the passes hold besides their graph: old gradients, batches, results that a script keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from backward_graphs import FLOAT, graph_of

from stepscope.predict.peak_memory.backward_graph import MemoryChange
from stepscope.predict.peak_memory.passes import (
    GraphLevels,
    TracedPasses,
    batches_bytes,
    old_gradients_bytes,
)
from stepscope.predict.peak_memory.peak import find_workspace, later_peak, passes_then
from stepscope.records.memory import CapturedBackward, CapturedMemory, CapturedPeak, CapturedPhase

# A product with a frozen weight gives logits [100] that nobody keeps; log_softmax keeps its result.
GRAPH = graph_of(
    [
        ["MmBackward0", 0, [[100, FLOAT]], [[-1, 0]], [["self", 0, 10, FLOAT]]],
        ["LogSoftmaxBackward0", -1, [[100, FLOAT]], [[0, 0]], [["result", 1, 100, FLOAT]]],
        ["NllLossBackward0", -1, [[1, FLOAT]], [[1, 0]], [["self", 1, 100, FLOAT]]],
    ],
    [[40, "activation"], [400, "activation"]],
)
KEPT = 40 + 400
STATES, GRADIENTS = 1_000, 300


def captured(phase: str, peak: dict[str, int], other: int = 0, **fields: Any) -> CapturedMemory:
    """`other` bytes are there when forward ends; gradients of the step before are gone then."""
    after = {"parameters": STATES, "gradients": 0, "activations": KEPT, "other": other}
    return CapturedMemory(
        device="cuda",
        graph=GRAPH,
        peak=CapturedPeak(categories=peak, phase=phase, allocated_bytes=sum(peak.values())),
        phases=[
            CapturedPhase(phase="begin", categories={"gradients": GRADIENTS}),
            CapturedPhase(phase="forward", categories=after, allocated_bytes=STATES + KEPT + other),
        ],
        **fields,
    )


IN_FORWARD = {"parameters": STATES, "gradients": GRADIENTS, "activations": KEPT, "other": 0}
IN_BACKWARD = {"parameters": STATES, "gradients": 0, "activations": KEPT, "other": 0}


@pytest.mark.parametrize(
    ("phase", "peak", "cleared_late", "held"),
    [
        ("forward", IN_FORWARD, False, GRADIENTS),  # the peak itself shows them
        ("backward", IN_BACKWARD, True, GRADIENTS),  # the trace shows zero_grad after forward
        ("backward", IN_BACKWARD, False, 0),
    ],
)
def test_gradients_of_the_step_before_may_stay_through_forward(
    phase: str, peak: dict[str, int], cleared_late: bool, held: int
) -> None:
    assert old_gradients_bytes(captured(phase, peak), cleared_late=cleared_late) == held


def test_a_peak_in_forward_keeps_old_gradients_whatever_changes() -> None:
    """Logits beside the result of log_softmax: 400 + 440; under autocast 200, a copy of the input
    of 20, and for the loss a wide copy of 400 of a narrow result."""
    levels = GraphLevels(captured("forward", {**IN_FORWARD, "temporaries": 400}))
    assert find_workspace(levels).size_bytes == 0
    present = STATES + GRADIENTS + KEPT + 400
    peak, _ = passes_then(levels, present, MemoryChange(autocast=True))
    forward = max(node.peak_bytes for node in levels.forward(MemoryChange(autocast=True)))
    assert peak == pytest.approx(STATES + GRADIENTS + forward, abs=4)  # the loss
    twice = levels.backward(MemoryChange(batch=2.0)).peak_bytes
    grown = max(STATES + twice, STATES + GRADIENTS + 2 * (KEPT + 400))
    assert later_peak(levels, 2.0) == grown


def test_forward_may_become_the_peak_when_gradients_are_cleared_after_it() -> None:
    categories = {**IN_BACKWARD, "temporaries": 800}
    late = GraphLevels(captured("backward", categories), TracedPasses(cleared_late=True))
    early = GraphLevels(captured("backward", categories))
    change = MemoryChange(autocast=True)
    both = [passes_then(levels, STATES + KEPT + 800, change)[0] for levels in (late, early)]
    forward = max(node.peak_bytes for node in late.forward(change))
    assert both[0] == max(both[1], STATES + GRADIENTS + forward)


# The same, with a view of the logits before log_softmax: logits.flatten(0, 1).
VIEWED = msgspec.convert(
    {
        **msgspec.to_builtins(GRAPH),
        "nodes": [
            ["MmBackward0", 0, [[100, FLOAT]], [[-1, 0]], [["self", 0, 10, FLOAT]]],
            ["ViewBackward0", -1, [[100, FLOAT]], [[0, 0]], []],
            ["LogSoftmaxBackward0", -1, [[100, FLOAT]], [[1, 0]], [["result", 1, 100, FLOAT]]],
            ["NllLossBackward0", -1, [[1, FLOAT]], [[2, 0]], [["self", 1, 100, FLOAT]]],
        ],
    },
    CapturedBackward,
)
# log_softmax reads logits.float()
ASKED = MemoryChange(autocast=True, wide_reads=frozenset({(2, 0)}))


def test_logits_that_the_script_holds_become_narrow_under_autocast() -> None:
    """They are in no node; after forward they are there as other, at the peak as a temporary."""
    levels = GraphLevels(captured("backward", {**IN_BACKWARD, "temporaries": 1_200}, other=400))
    assert levels.outputs_bytes(MemoryChange()) == (400, 0)
    assert levels.outputs_bytes(MemoryChange(autocast=True)) == (200, 0)


def test_of_logits_asked_for_in_fp32_the_script_holds_one_or_the_other() -> None:
    memory = captured("backward", {**IN_BACKWARD, "temporaries": 1_200}, other=400)
    levels = GraphLevels(msgspec.structs.replace(memory, graph=VIEWED))
    assert levels.outputs_bytes(ASKED) == (300, 100)  # 200 narrow or 400 wide
    # Backward: the script's logits, a copy of x in bf16, the softmax and two gradients of it.
    peak, doubt = passes_then(levels, STATES + KEPT + 1_200, ASKED)
    assert peak == STATES + 300 + 20 + 3 * 400
    assert doubt >= 100


def test_forward_holds_the_narrow_logits_and_their_wide_copy_once() -> None:
    """Old gradients stay through forward. The logits, which the script holds after it, count there
    where they are made and read."""
    memory = captured("backward", {**IN_BACKWARD, "temporaries": 1_200}, other=400)
    memory = msgspec.structs.replace(memory, graph=VIEWED, phases=[*_much_old(), memory.phases[1]])
    levels = GraphLevels(memory, TracedPasses(cleared_late=True))
    peak, _ = passes_then(levels, STATES + KEPT + 1_200, ASKED)
    in_forward = 20 + 200 + 400 + 400  # x in bf16, logits, the copy, the softmax
    assert peak == STATES + 600 + in_forward


def _much_old() -> list[CapturedPhase]:
    return [CapturedPhase(phase="begin", categories={"gradients": 600})]


def test_other_memory_of_another_size_is_no_result() -> None:
    levels = GraphLevels(captured("backward", {**IN_BACKWARD, "temporaries": 1_200}, other=130))
    assert levels.outputs_bytes(MemoryChange(autocast=True)) == (0, 0)


def test_a_peak_before_the_model_runs_is_no_workspace() -> None:
    """The script stacks its batch: nothing is kept for backward then."""
    before = {"parameters": STATES, "gradients": 0, "activations": 0, "other": 9_000}
    levels = GraphLevels(captured("forward", before))
    assert find_workspace(levels).size_bytes == 0
    assert passes_then(levels, STATES + 9_000, MemoryChange(autocast=True))[0] == STATES + 9_000


def test_only_batches_that_are_still_there_grow_with_the_passes() -> None:
    """A list of screens that was stacked is gone when forward ends."""
    before = {"parameters": STATES, "gradients": 0, "activations": 0, "other": 1_200}
    assert batches_bytes(captured("forward", before, other=600, inputs_bytes=1_200)) == 600


def test_without_a_graph_no_workspace_is_known() -> None:
    bare = msgspec.structs.replace(captured("backward", IN_BACKWARD), graph=None)
    assert find_workspace(GraphLevels(bare)).size_bytes == 0
    assert later_peak(GraphLevels(bare), 2.0) is None
