"""What of an optimizer's step is its own: a closure inside it is forward and backward."""

from __future__ import annotations

import numpy as np

from stepscope.explain.rank import explain_rank
from stepscope.step.phases import PHASES, find_phases, in_optimizer

from .build import AUTOGRAD, Events, note, op, step
from .conftest import Read

NODE = "autograd::engine::evaluate_function: MmBackward0"


def own(read: Read, *events: Events) -> dict[str, bool]:
    """Which operators the optimizer's step is made of."""
    trace = read(step(1, start=0, dur=100), *events)
    mine = in_optimizer(trace, np.arange(len(trace.host)))
    return {
        trace.strings[name]: bool(inside)
        for name, inside in zip(trace.host.name, mine, strict=True)
        if trace.strings[name].startswith("aten::")
    }


STEP = note("Optimizer.step#AdamW.step", start=10, dur=80)
FORWARD = op("aten::mm", start=15, dur=10)
UPDATE = op("aten::_foreach_add_", start=70, dur=10)


def test_without_a_closure_all_inside_is_its_own(read: Read) -> None:
    assert own(read, STEP, UPDATE) == {"aten::_foreach_add_": True}


def test_what_runs_before_the_last_backward_node_ends_is_a_closure(read: Read) -> None:
    backward = [*op(NODE, start=30, dur=30), *op("aten::t", start=35, dur=5)]
    found = own(read, STEP, FORWARD, backward, UPDATE)
    assert found == {"aten::mm": False, "aten::t": False, "aten::_foreach_add_": True}


def test_backward_on_a_thread_of_its_own_is_seen_too(read: Read) -> None:
    backward = op(NODE, start=30, dur=30, thread=AUTOGRAD)
    assert own(read, STEP, FORWARD, backward, UPDATE) == {
        "aten::mm": False,
        "aten::_foreach_add_": True,
    }


def test_backward_before_the_step_is_no_closure(read: Read) -> None:
    backward = op(NODE, start=1, dur=8)
    assert own(read, backward, STEP, UPDATE) == {"aten::_foreach_add_": True}


def test_where_capture_marked_closures_the_work_between_them_is_the_optimizers(read: Read) -> None:
    """As LBFGS does: two closures with its own sums in between."""
    marks = [
        *note("stepscope: closure", start=12, dur=20),
        *note("stepscope: closure", start=45, dur=20),
    ]
    nodes = [*op(NODE, start=20, dur=5), *op(NODE, start=55, dur=5)]
    between = op("aten::dot", start=35, dur=5)
    assert own(read, STEP, marks, FORWARD, nodes, between, UPDATE) == {
        "aten::mm": False,
        "aten::dot": True,
        "aten::_foreach_add_": True,
    }


def test_phases_of_a_step_inside_the_optimizer(read: Read) -> None:
    trace = read(step(1, start=0, dur=100), STEP, FORWARD, op(NODE, start=30, dur=30), UPDATE)
    phases = find_phases(trace, explain_rank(trace).steps).phase
    by_name = {
        trace.strings[name]: PHASES[phase]
        for name, phase in zip(trace.host.name, phases, strict=True)
    }
    assert by_name["aten::mm"] == "forward"
    assert by_name[NODE] == "backward"
    assert by_name["aten::_foreach_add_"] == "optimizer"
