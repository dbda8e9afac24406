"""`explain --json`, schema 1: every name of the contract is there with its type.

Keys may be added, never removed or renamed: other programs read them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from jobs import Fault, Plan, make_job
from jobs_files import write_job
from stepscope.explain.explain_job import explain_job
from stepscope.ui.topics.explanation_json import explanation_json

if TYPE_CHECKING:
    from pathlib import Path

NUMBER = (int, float)
MAYBE_INT = (int, type(None))
MAYBE_NUMBER = (int, float, type(None))
MAYBE_TEXT = (str, type(None))
MAYBE_OBJECT = (dict, type(None))

TOP = {
    "schema": int,
    "verdict": str,
    "ranks": list,
    "budget": dict,
    "findings": list,
    "collectives": list,
    "stragglers": dict,
    "clock": dict,
    "arrivals": list,
    "critical_path": MAYBE_OBJECT,
    "steps_by_rank": MAYBE_OBJECT,
}
RANK = {
    "rank": MAYBE_INT,
    "world_size": MAYBE_INT,
    "device": MAYBE_TEXT,
    "kind": str,
    "events": int,
    "timeline_ns": dict,
    "comm_ns": int,
    "memory_ns": int,
    "overlap": MAYBE_NUMBER,
    "idle_ns": dict,
    "steps": list,
    "step_ms": dict,
    "kernels": list,
    "efficiency": MAYBE_OBJECT,
    "memory": MAYBE_OBJECT,
    "quality": list,
}
TIMELINE = dict.fromkeys(("span", "compute", "exposed_comm", "exposed_memory", "idle"), int)
IDLE = dict.fromkeys(("host", "launch", "other"), int)
STEP = {"name": str, "start_ns": int, "dur_ns": int}
STEP_MS = dict.fromkeys(("profiled", "corrected", "low", "high", "truth"), MAYBE_NUMBER)
KERNEL = {"name": str, "count": int, "total_ns": int, "kind": str}
NOTE = {"id": str, "detail": str}
BUDGET = {"step_ms": NUMBER, "parts": list}
PART = {"id": str, "ms": NUMBER, "share": NUMBER}
FINDING = {
    "id": str,
    "share": NUMBER,
    "severity": str,
    "summary": str,
    "evidence": (list, tuple),
    "where": (list, tuple),
    "remedies": (list, tuple),
}
PLACE = {"file": str, "line": int}
REMEDY = {
    "id": str,
    "predicted_ms": MAYBE_NUMBER,
    "low_ms": MAYBE_NUMBER,
    "high_ms": MAYBE_NUMBER,
}
COLLECTIVE = {
    "kind": str,
    "group": str,
    "group_size": MAYBE_INT,
    "size_bytes": MAYBE_INT,
    "count": int,
    "algbw_gb_s": MAYBE_NUMBER,
    "busbw_gb_s": MAYBE_NUMBER,
    "total_ns": MAYBE_INT,
    "wait_ns": MAYBE_INT,
    "wait_error_ns": MAYBE_INT,
    "transfer_ns": MAYBE_INT,
    "exposed_ns": int,
    "expected_ns": MAYBE_NUMBER,
    "slowest_rank": MAYBE_INT,
    "rank": MAYBE_INT,
}
STRAGGLERS = {"verdict": str, "ranks": list, "detail": str}
STRAGGLER = {
    "rank": MAYBE_INT,
    "cause": str,
    "slowdown": NUMBER,
    "cost_ms": NUMBER,
    "steps": int,
    "of": int,
    "group": MAYBE_TEXT,
    "evidence": list,
}
CLOCK = {
    "aligned": bool,
    "offset_ns": dict,
    "error_ns": dict,
    "drift_ppm": dict,
    "reference": MAYBE_INT,
    "detail": str,
}
ARRIVAL = {"rank": int, "times_last": int, "of": int, "lead_ns": int, "waits_ns": int}
PATH = {"step": int, "start_ns": int, "end_ns": int, "pieces": list, "share_by_rank": dict}
PIECE = {"rank": int, "kind": str, "start_ns": int, "end_ns": int, "label": str}
MATRICES = ("step_ns", "own_ns", "exposed_comm_ns", "input_ns")


def assert_has(found: Any, expected: dict[str, Any], where: str) -> None:
    for key, kinds in expected.items():
        assert key in found, f"{where}.{key} is missing"
        value = found[key]
        assert isinstance(value, kinds), f"{where}.{key} is {value!r}"
        if kinds is not bool:
            assert not isinstance(value, bool), f"{where}.{key} is {value!r}"


def assert_contract(answer: dict[str, Any]) -> None:
    assert_has(answer, TOP, "")
    assert answer["schema"] == 1
    for rank in answer["ranks"]:
        assert_rank(rank)
    assert_budget(answer["budget"])
    for finding in answer["findings"]:
        assert_has(finding, FINDING, "findings")
        assert finding["severity"] in ("high", "medium", "low", "none")
        for place in finding["where"]:
            assert_has(place, PLACE, "findings.where")
        for remedy in finding["remedies"]:
            assert_has(remedy, REMEDY, "findings.remedies")
    for collective in answer["collectives"]:
        assert_has(collective, COLLECTIVE, "collectives")
    assert_has(answer["stragglers"], STRAGGLERS, "stragglers")
    verdicts = ("none", "found", "not resolved", "one rank only")
    assert answer["stragglers"]["verdict"] in verdicts
    for straggler in answer["stragglers"]["ranks"]:
        assert_has(straggler, STRAGGLER, "stragglers.ranks")
        assert straggler["cause"] in ("compute", "input", "link")
    assert_has(answer["clock"], CLOCK, "clock")
    for arrival in answer["arrivals"]:
        assert_has(arrival, ARRIVAL, "arrivals")
    if answer["critical_path"] is not None:
        assert_path(answer["critical_path"])
    if answer["steps_by_rank"] is not None:
        assert_matrices(answer["steps_by_rank"])


def assert_path(path: dict[str, Any]) -> None:
    """Its pieces fill the step, so its shares add up to one."""
    assert_has(path, PATH, "critical_path")
    edges = [path["start_ns"]]
    for piece in path["pieces"]:
        assert_has(piece, PIECE, "critical_path.pieces")
        assert piece["kind"] in ("work", "input", "transfer")
        assert piece["start_ns"] == edges[-1]
        edges.append(piece["end_ns"])
    assert edges[-1] == path["end_ns"]
    shares = sum(path["share_by_rank"].values()) + path["transfer_share"]
    assert shares == pytest.approx(1)


def assert_matrices(table: dict[str, Any]) -> None:
    for name in MATRICES:
        assert len(table[name]) == len(table["steps"])
        assert all(len(row) == len(table["ranks"]) for row in table[name])


def assert_rank(rank: dict[str, Any]) -> None:
    assert_has(rank, RANK, "ranks")
    assert rank["kind"] in ("cuda", "rocm", "xpu", "mtia", "cpu")
    timeline = rank["timeline_ns"]
    assert_has(timeline, TIMELINE, "timeline_ns")
    assert timeline["span"] == sum(timeline[key] for key in TIMELINE if key != "span")
    assert_has(rank["idle_ns"], IDLE, "idle_ns")
    assert sum(rank["idle_ns"][key] for key in IDLE) == timeline["idle"]
    assert_has(rank["step_ms"], STEP_MS, "step_ms")
    for step in rank["steps"]:
        assert_has(step, STEP, "steps")
    for kernel in rank["kernels"]:
        assert_has(kernel, KERNEL, "kernels")
        assert kernel["kind"] in ("compute", "comm", "memory")
    totals = [kernel["total_ns"] for kernel in rank["kernels"]]
    assert totals == sorted(totals, reverse=True)
    for note in rank["quality"]:
        assert_has(note, NOTE, "quality")


def assert_budget(budget: dict[str, Any]) -> None:
    assert_has(budget, BUDGET, "budget")
    for part in budget["parts"]:
        assert_has(part, PART, "budget.parts")
    assert sum(part["share"] for part in budget["parts"]) == pytest.approx(1, abs=1e-9)
    assert {"compute", "exposed_comm", "exposed_memory"} <= {p["id"] for p in budget["parts"]}


def answer_for(*paths: Path) -> dict[str, Any]:
    """As a program sees it: through JSON text that has no NaN."""
    text = json.dumps(explanation_json(explain_job(*paths, cache=False)), allow_nan=False)
    return json.loads(text)


@pytest.mark.parametrize(
    ("name", "kind", "device"),
    [
        ("third_party/a100_nccl_rank0of2", "cuda", "NVIDIA A100-PG509-200"),
        ("third_party/mi300x_bert_small", "rocm", None),
        ("third_party/cpu_only_gloo_rank34", "cpu", None),
        ("third_party/a100_alexnet", "cuda", "NVIDIA A100-PG509-200"),
        ("h200/gpt2s_b8_bf16_stack", "cuda", "NVIDIA H200"),
        ("h200/gpt2s_b8_bf16_graph", "cuda", "NVIDIA H200"),
    ],
)
def test_contract_holds_on_real_traces(
    shared: Path, name: str, kind: str, device: str | None
) -> None:
    answer = answer_for(shared / "traces" / f"{name}.json.gz")
    assert_contract(answer)
    (rank,) = answer["ranks"]
    assert (rank["kind"], rank["device"]) == (kind, device)
    assert answer["stragglers"]["verdict"] == "one rank only"


def test_collectives_of_a_real_nccl_trace_are_in_the_contract(shared: Path) -> None:
    answer = answer_for(shared / "traces" / "third_party" / "a100_nccl_rank0of2.json.gz")
    rank = answer["ranks"][0]
    assert rank["overlap"] == pytest.approx(rank_overlap(rank))
    assert sum(row["count"] for row in answer["collectives"]) == 21
    assert all(row["group_size"] == 2 for row in answer["collectives"])


def rank_overlap(rank: dict[str, Any]) -> float:
    return float(1 - rank["timeline_ns"]["exposed_comm"] / rank["comm_ns"])


def test_contract_holds_for_two_ranks_of_one_job(shared: Path) -> None:
    traces = shared / "traces" / "third_party"
    answer = answer_for(traces / "pair_rank0of128.json.gz", traces / "pair_rank1of128.json.gz")
    assert_contract(answer)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert answer["stragglers"]["verdict"] == "not resolved"
    assert answer["stragglers"]["detail"]
    assert {row["rank"] for row in answer["collectives"]} == {None, 0, 1}  # joined, and left alone
    assert answer["steps_by_rank"]["ranks"] == [0, 1]


def test_ranks_of_a_job_are_joined_in_the_contract(tmp_path: Path) -> None:
    """Four ranks of which one is slow, as files: who, by how much, on which clock."""
    plan = Plan(
        ranks=4, steps=6, rounds=20, fault=Fault(cause="compute", size=1.5, place=2), seed=3
    )
    write_job(tmp_path, make_job(plan))
    answer = answer_for(tmp_path)
    assert_contract(answer)
    (straggler,) = answer["stragglers"]["ranks"]
    assert (straggler["rank"], straggler["cause"]) == (2, "compute")
    clock = answer["clock"]
    assert clock["aligned"]
    assert set(clock["offset_ns"]) == set(clock["error_ns"]) == {"0", "1", "2", "3"}
    assert clock["offset_ns"][str(clock["reference"])] == 0
    assert answer["arrivals"][0]["rank"] == 2
    assert max(answer["critical_path"]["share_by_rank"].items(), key=lambda e: e[1])[0] == "2"
    rows = answer["collectives"]
    assert {row["rank"] for row in rows} == {None}
    assert all(row["slowest_rank"] == 2 for row in rows)
    assert all(row["total_ns"] == row["wait_ns"] + row["transfer_ns"] for row in rows)
    own = answer["steps_by_rank"]["own_ns"]
    assert all(step[2] == max(step) for step in own)


def test_collectives_that_only_one_rank_knows_stay_in_the_contract(tmp_path: Path) -> None:
    """Two files of different groups share nothing: each keeps its own rows."""
    paths = write_job(tmp_path, make_job(Plan(ranks=8, form="tensor", tensor_ranks=2, steps=2)))
    answer = answer_for(paths[0], paths[3])
    assert_contract(answer)
    assert {row["rank"] for row in answer["collectives"]} <= {None, 0, 3}
    assert {0, 3} <= {row["rank"] for row in answer["collectives"]}
    assert all(row["wait_ns"] is None for row in answer["collectives"] if row["rank"] is not None)


def test_contract_holds_for_a_training_on_the_cpu_with_gloo(tmp_path: Path) -> None:
    """What `stepscope demo` records: two processes, steps, operators, gloo on worker threads."""
    for rank in (0, 1):
        write_cpu_training(tmp_path / f"rank{rank}.json", rank=rank)
    answer = answer_for(tmp_path)
    assert_contract(answer)
    for rank in answer["ranks"]:
        assert rank["kind"] == "cpu"
        assert rank["device"] is None
        # each 100 µs step: 60 µs operators, 20 µs gloo of which 10 behind them, 30 µs idle
        assert rank["timeline_ns"]["compute"] == 120_000
        assert rank["timeline_ns"]["exposed_comm"] == 20_000
        assert rank["overlap"] == 0.5
    (row,) = answer["collectives"]
    assert (row["kind"], row["size_bytes"], row["count"], row["rank"]) == (
        "all_reduce",
        4096,
        2,
        None,
    )


def write_cpu_training(path: Path, *, rank: int) -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Any:
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": tid,
            "ts": 1000 + ts,
            "dur": dur,
            "args": args,
        }

    shapes = {"Input Dims": [[1024]], "Input type": ["float"]}
    events = []
    for step in (0, 1):
        at = 100 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 100),
            event("cpu_op", "aten::addmm", at, 50, **shapes),
            event("user_annotation", "gloo:all_reduce", at + 40, 20, tid=2, **shapes),
            event("cpu_op", "aten::add_", at + 90, 10, **shapes),
        ]
    info = {"backend": "gloo", "rank": rank, "world_size": 2}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
