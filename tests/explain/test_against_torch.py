"""A trace recorded here and now, against what PyTorch's own profiler says about it.

Operators and Python functions agree to the nanosecond. Two differences are by design: PyTorch's
totals count a recursive call again in its caller's, and its tables mix operators, annotations and
Python functions, which are three tables here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepscope import explain_rank, read_trace
from stepscope.records.explanation import RankExplanation
from stepscope.records.trace import Trace

from .reference import account_for

torch = pytest.importorskip("torch", reason="records a real trace")


BATCHES = (8, 8, 4, 8)


@dataclass(frozen=True)
class Recording:
    """One training as PyTorch and as stepscope see it."""

    profile: Any
    path: Path
    trace: Trace
    rank: RankExplanation


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Four AdamW steps of a small MLP, the third with a smaller batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: int) -> None:
        optimizer.zero_grad()
        output = model(torch.randn(batch, 16))
        target = torch.zeros(batch, dtype=torch.long)
        torch.nn.functional.cross_entropy(output, target).backward()
        optimizer.step()

    train(8)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=len(BATCHES), repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        with_stack=True,
        schedule=schedule,
        acc_events=True,
    ) as profile:
        for batch in (8, *BATCHES):
            train(batch)
            profile.step()
    path = tmp_path_factory.mktemp("torch") / "trace.json"
    profile.export_chrome_trace(str(path))
    trace = read_trace(path, cache=False)
    return Recording(profile=profile, path=path, trace=trace, rank=explain_rank(trace))


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def test_operator_calls_and_own_times_equal_torchs_to_the_nanosecond(recording: Recording) -> None:
    theirs = {
        row.key: (row.count, ns(row.self_cpu_time_total))
        for row in recording.profile.key_averages()
    }
    ours: dict[str, tuple[int, int]] = {}
    for row in recording.rank.operators:
        calls, own = ours.get(row.name, (0, 0))
        ours[row.name] = (calls + row.calls, own + row.host_self_ns)
    assert len(ours) > 40
    assert ours == {name: theirs[name] for name in ours}


def test_no_operator_of_torchs_is_missing(recording: Recording) -> None:
    names = {row.key for row in recording.profile.key_averages() if "::" in row.key}
    names = {name for name in names if name.startswith(("aten::", "autograd::"))}
    assert names <= {row.name for row in recording.rank.operators}
    assert "aten::addmm" in names


def test_grouping_by_input_shape_equals_torchs(recording: Recording) -> None:
    theirs = {
        (row.key, json.dumps(row.input_shapes)): (row.count, ns(row.self_cpu_time_total))
        for row in recording.profile.key_averages(group_by_input_shape=True)
    }
    ours: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in recording.rank.operators:
        key = (row.name, json.dumps(json.loads(row.shapes)) if row.shapes else "[]")
        calls, own = ours[key]
        ours[key] = (calls + row.calls, own + row.host_self_ns)
    assert dict(ours) == {key: theirs[key] for key in ours}
    linear = {shapes: calls for (name, shapes), (calls, _) in ours.items() if name == "aten::addmm"}
    assert linear == {
        "[[32], [8, 16], [16, 32], [], []]": 3,
        "[[32], [4, 16], [16, 32], [], []]": 1,
        "[[4], [8, 32], [32, 4], [], []]": 3,
        "[[4], [4, 32], [32, 4], [], []]": 1,
    }


def test_totals_equal_torchs_where_nothing_recurses(recording: Recording) -> None:
    theirs = {row.key: ns(row.cpu_time_total) for row in recording.profile.key_averages()}
    ours: dict[str, int] = defaultdict(int)
    for row in recording.rank.operators:
        ours[row.name] += row.host_total_ns
    assert dict(ours) == {name: theirs[name] for name in ours}


def test_python_functions_equal_torchs(recording: Recording) -> None:
    theirs = {
        row.key: (row.count, ns(row.self_cpu_time_total))
        for row in recording.profile.key_averages()
    }
    ours = {
        f"{line.file}({line.line}): {line.function}": (line.calls, line.host_self_ns)
        for line in recording.rank.lines
    }
    assert len(ours) > 20
    assert ours == {name: theirs[name] for name in ours}


def test_modules_are_called_once_a_step_and_hold_each_other(recording: Recording) -> None:
    modules = {module.name: module for module in recording.rank.modules}
    assert {name: module.calls for name, module in modules.items()} == {
        "Sequential_0": 4,
        "Linear_0": 4,
        "ReLU_0": 4,
        "Linear_1": 4,
    }
    inner = sum(m.host_total_ns for name, m in modules.items() if name != "Sequential_0")
    whole = modules["Sequential_0"]
    assert whole.host_self_ns == whole.host_total_ns - inner


def test_the_parts_add_up(recording: Recording) -> None:
    rank = recording.rank
    timeline = rank.timeline
    assert timeline.span_ns == timeline.compute_ns + timeline.exposed_comm_ns + timeline.idle_ns
    assert timeline.idle_ns == rank.idle.host_ns
    own = sum(operator.host_self_ns for operator in rank.operators)
    assert own == timeline.compute_ns  # one thread computes: its operators are all there is
    assert own == sum(kernel.total_ns for kernel in rank.kernels)
    assert sum(part.share for part in rank.budget.parts) == pytest.approx(1, abs=1e-9)


def test_steps_are_those_of_the_schedule(recording: Recording) -> None:
    names = [step.name for step in recording.rank.steps.steps]
    assert names == [f"ProfilerStep#{n}" for n in range(1, 1 + len(BATCHES))]
    assert len(recording.rank.steps.cycles_ns) == len(BATCHES)


def test_backward_operators_know_their_forward(recording: Recording) -> None:
    trace = recording.trace
    names = [trace.strings[code] for code in trace.host.name.tolist()]
    forward_of = trace.host.forward_of.tolist()
    linked = {
        (name, names[forward])
        for name, forward in zip(names, forward_of, strict=True)
        if name in ("AddmmBackward0", "ReluBackward0") and forward >= 0
    }
    assert linked == {("AddmmBackward0", "aten::addmm"), ("ReluBackward0", "aten::relu")}


def test_the_plain_reference_agrees(recording: Recording) -> None:
    theirs = account_for(recording.path)
    timeline = recording.rank.timeline
    assert theirs.timeline_ns["compute"] == timeline.compute_ns
    assert theirs.timeline_ns["idle"] == timeline.idle_ns
    ours = {(k.name, k.kind): (k.count, k.total_ns) for k in recording.rank.kernels}
    assert ours == theirs.kernels
