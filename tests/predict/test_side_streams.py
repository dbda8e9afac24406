"""Parts of one operator on several streams, which take turns on a full device."""

from __future__ import annotations

import numpy as np

from graphs import Call, Task, make
from stepscope.predict.kernel_costs import retime_tasks
from stepscope.step.replay import step_ns

CONVOLUTION, SUM = 7, 9  # host rows of operators
# Two parts of a convolution: the second starts when the first ends, 100 ns after the kernel before
# both; its second kernel waits for the other stream's. A sum follows on the main stream.
GRAPH = make(
    Call(1, tasks=(Task(50),)),
    Call(1, tasks=(Task(100, stream=1, after=0),)),
    Call(1, tasks=(Task(100, stream=2, after=0, delay=100),)),
    Call(1, tasks=(Task(100, stream=1, spacing=100),)),
    Call(1, tasks=(Task(100, stream=2, spacing=100),)),
    Call(1, tasks=(Task(10, after=4, delay=3),)),
    Call(1, waits=(0,)),
)
OPERATOR = np.array([CONVOLUTION] * 5 + [SUM], np.int32)


def test_waits_shrink_with_the_kernels_that_are_waited_for() -> None:
    whole = np.array([50.0, 100, 100, 100, 100, 10])
    half = retime_tasks(GRAPH, whole / 2, OPERATOR)
    assert half.tasks.after_ns.tolist() == [0, 0, 50, 0, 0, 3]
    assert half.tasks.spacing_ns.tolist() == [0, 0, 0, 50, 50, 0]
    assert step_ns(GRAPH) - step_ns(half) == (450 + 10) / 2


def test_an_operator_on_one_stream_keeps_its_spacing() -> None:
    plain = make(Call(1, tasks=(Task(50), Task(50, spacing=4))), Call(1, waits=(0,)))
    longer = retime_tasks(plain, np.array([100.0, 100.0]), np.array([CONVOLUTION] * 2, np.int32))
    assert longer.tasks.spacing_ns.tolist() == [0, 4]


def test_tasks_of_unknown_operators_are_left_alone() -> None:
    unknown = retime_tasks(GRAPH, GRAPH.tasks.dur_ns * 2, np.full(6, -1, np.int32))
    assert unknown.tasks.after_ns.tolist() == GRAPH.tasks.after_ns.tolist()
