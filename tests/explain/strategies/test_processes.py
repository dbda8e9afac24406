"""Real processes over gloo, captured as a user would; nobody told which strategy it is. Two of
them where two show all there is, else four.

Stages of the pipelines sleep a known time for each micro-batch, so their true idle time is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from stepscope.explain.findings import apply_rules
from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.explain.job.rank_part import measure_rank_steps
from stepscope.records.job import Clock, RankPart
from stepscope.records.strategies import (
    DataParallel,
    FullySharded,
    Pipeline,
    RankPipeline,
    Strategy,
    TensorParallel,
)
from stepscope.step.collectives import list_calls
from stepscope.step.steps import find_steps
from stepscope.step.work import find_work
from stepscope.trace.read import read_trace
from stepscope.trace.run_folder.rank_folder import read_rank_folder

from .found import job_with, join, strategies_of
from .schedules import simulate

SCRIPTS = Path(__file__).parent / "scripts"
START = Path(__file__).parents[1] / "scripts/start_ranks.py"
WINDOW = ["--wait", "2", "--warmup", "1", "--active", "3"]
POINTS = 0.05


def capture(out: Path, script: str, *arguments: str, ranks: int = 4, memory: bool = False) -> Path:
    """A run folder; the script's own output and errors only matter when it fails."""
    ours = [sys.executable, "-m", "stepscope", "run", "--out", str(out), "--no-explain", *WINDOW]
    ours += [] if memory else ["--no-memory"]
    launch = [sys.executable, str(START), str(ranks)]
    done = subprocess.run(
        [*ours, "--", *launch, str(SCRIPTS / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(traces(out)) == ranks
    return out


def traces(run: Path) -> list[Path]:
    return sorted(run.glob("rank-*/trace.json.gz"))


def found_in(run: Path, *, bare: bool = False, clock: Clock | None = None) -> tuple[Strategy, ...]:
    """All ranks of a run; `bare` as if only the traces were there."""
    parts = []
    for path in traces(run):
        folder = None if bare else read_rank_folder(path)
        parts.append(strategies_of(read_trace(path, cache=False), folder=folder))
    return join(parts, clock)


def clock_of(run: Path) -> Clock:
    """The ranks' clocks, as the whole explanation ties them."""
    parts = []
    for rank, path in enumerate(traces(run)):
        trace, folder = read_trace(path, cache=False), read_rank_folder(path)
        work = find_work(trace)
        steps = find_steps(trace, work)
        calls, pace = (
            list_calls(trace, work, steps, folder)[0],
            measure_rank_steps(trace, work, steps),
        )
        rounds = folder.rounds if folder else ()
        parts.append(RankPart(rank=rank, calls=calls, pace=pace, rounds=rounds))
    return join_ranks(parts).clock


def test_data_parallel(tmp_path: Path) -> None:
    """Rank 1 begins every step 100 ms late."""
    run = capture(tmp_path / "run", "data_parallel", "0.1", ranks=2)
    (told,) = found_in(run, clock=clock_of(run))
    assert isinstance(told, DataParallel)
    assert [bucket.late_rank for bucket in told.buckets] == [1, 1, 1]
    assert told.buckets[0].why == "late rank"
    assert (told.buckets[0].wait_ns or 0) > 40_000_000  # 100 ms on one of two ranks
    for bare in (False, True):
        (each,) = found_in(run, bare=bare)
        assert isinstance(each, DataParallel)
        assert (each.size, each.ranks) == (2, (0, 1))
        assert [bucket.size_bytes for bucket in each.buckets] == [1_182_720] * 3
        ready = [bucket.ready_ns or 0 for bucket in each.buckets]
        assert ready == sorted(ready)
        assert ready[0] > 0
        assert each.buckets[-1].why != "hidden"
        assert 0 < each.exposed_ns <= each.comm_ns < each.step_ns
        names = [name for bucket in each.buckets for name in bucket.parameters]
        assert len(names) == (0 if bare else 12)


def test_fully_sharded(tmp_path: Path) -> None:
    run = capture(tmp_path / "run", "fully_sharded", ranks=2, memory=True)
    (each,) = found_in(run)
    assert isinstance(each, FullySharded)
    assert (each.flavour, each.stage, each.size, each.replicas) == ("FSDP2", 3, 2, 1)
    blocks = {(b.name, b.operation, b.phase): b for b in each.blocks}
    assert {name for name, _, _ in blocks} == {"(root)", "0", "1", "2"}
    assert blocks["1", "gather", "forward"].size_bytes == 4 * 2 * (256 * 256 + 256)
    assert blocks["1", "gather", "backward"].prefetched
    assert blocks["1", "gather", "forward"].prefetched is False
    assert blocks["1", "scatter", "backward"].count == 1
    memory = each.memory
    assert memory is not None
    assert memory.parameters == 3 * 2 * (256 * 256 + 256) + 256 * 8 + 8
    assert memory.measured_bytes is not None
    assert abs(memory.measured_bytes - memory.formula_bytes[3]) < 0.01 * memory.formula_bytes[3]
    (bare,) = found_in(run, bare=True)
    assert isinstance(bare, FullySharded)
    assert bare.size == 2


@pytest.mark.slow
def test_hybrid_sharding(tmp_path: Path) -> None:
    (each,) = found_in(capture(tmp_path / "run", "fully_sharded", "hybrid"))
    assert isinstance(each, FullySharded)
    assert (each.size, each.replicas) == (2, 2)
    assert {group.description for group in each.groups} == {"mesh_shard"}
    assert {group.description for group in each.replicate_groups} == {"mesh_replicate"}


@pytest.mark.slow
def test_tensor_parallel_alone(tmp_path: Path) -> None:
    (each,) = found_in(capture(tmp_path / "run", "tensor_parallel"))
    assert isinstance(each, TensorParallel)
    assert each.size == 4
    # Three layers meet once forward and once backward; the first needs no gradient of its input.
    assert (each.forward_count, each.backward_count) == (3, 2)
    assert each.split_parameters == 9
    assert 0 < each.comm_share < 1


@pytest.mark.slow
def test_sharded_and_tensor_parallel_on_a_mesh(tmp_path: Path) -> None:
    sharded, tensor = found_in(capture(tmp_path / "run", "tensor_parallel", "sharded"))
    assert isinstance(sharded, FullySharded)
    assert isinstance(tensor, TensorParallel)
    assert {group.description for group in sharded.groups} == {"mesh_dp"}
    assert {group.description for group in tensor.groups} == {"mesh_tp"}
    assert {group.ranks for group in tensor.groups} == {(0, 1), (2, 3)}
    assert sharded.size == tensor.size == 2
    # Three layers meet once forward and once backward; the first needs no gradient of its input.
    assert (tensor.forward_count, tensor.backward_count) == (3, 2)
    assert tensor.split_parameters == 9
    assert 0 < tensor.comm_share < 1


PIPELINES = [
    pytest.param("ScheduleGPipe", 6, [30.0] * 4, [60.0] * 4, id="gpipe"),
    pytest.param("Schedule1F1B", 6, [30.0] * 4, [60.0] * 4, id="1f1b", marks=pytest.mark.slow),
    pytest.param(
        "Schedule1F1B",
        6,
        [20.0, 40.0, 20.0, 20.0],
        [40.0, 80.0, 40.0, 40.0],
        id="1f1b-uneven",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "microbatches", "forward_ms", "backward_ms"), PIPELINES)
def test_pipeline_idles_as_long_as_it_truly_does(
    tmp_path: Path,
    schedule: str,
    microbatches: int,
    forward_ms: list[float],
    backward_ms: list[float],
) -> None:
    times = [",".join(map(str, each)) for each in (forward_ms, backward_ms)]
    run = capture(tmp_path / "run", "pipeline", schedule, str(microbatches), *times)
    (each,) = found_in(run)
    assert isinstance(each, Pipeline)
    assert (each.size, each.microbatches) == (4, microbatches)
    expected = "fill and drain" if schedule == "ScheduleGPipe" else "one forward one backward"
    assert each.schedule == expected
    assert [stage.stage_indices for stage in each.stages] == [(0,), (1,), (2,), (3,)]
    step_ms, simulated = simulate(schedule, microbatches, forward_ms, backward_ms)
    slept = [microbatches * (f + b) for f, b in zip(forward_ms, backward_ms, strict=True)]
    for stage, own_ms, share, wall_ms in zip(
        each.stages, slept, simulated, _walls(run), strict=True
    ):
        assert stage.bubble_share == pytest.approx(1 - own_ms / wall_ms, abs=POINTS)
        # A busy machine takes longer than the schedule, never shorter.
        late = max(0.0, 1 - step_ms / wall_ms)
        assert share - POINTS < stage.bubble_share < share + late + POINTS
        parts = stage.compute_ns + stage.other_comm_ns + stage.bubble_ns
        assert parts == pytest.approx(stage.step_ns, abs=2)
    even = len(set(forward_ms)) == 1
    assert each.deciding_stage == (None if even else 1)
    assert each.bound_share == pytest.approx(3 / (microbatches + 3))
    (finding,) = apply_rules("job", JobEvidence(job_with(), [each]))
    assert (finding.remedies[0].id == "balance-stages") == (not even)


def _walls(run: Path) -> list[float]:
    """Each rank's step in ms, as capture measured it: mean over the profiler's steps."""
    out = []
    for path in traces(run):
        text = (path.parent / "steps.jsonl").read_text()
        rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        profiled = [row["wall_ns"] / 1e6 for row in rows if row["window"]]
        out.append(mean(profiled[-3:]))
    return out


@pytest.mark.slow
def test_a_bare_pipeline_is_told_without_its_stages(tmp_path: Path) -> None:
    """And with two replicas of two stages: data parallelism beside it."""
    run = capture(tmp_path / "run", "pipeline", "Schedule1F1B", "4", "20,20", "40,40", "replicas")
    pipeline, data = found_in(run)
    assert isinstance(pipeline, Pipeline)
    assert isinstance(data, DataParallel)
    assert (pipeline.size, pipeline.replicas, pipeline.microbatches) == (2, 2, 4)
    assert [stage.ranks for stage in pipeline.stages] == [(0, 2), (1, 3)]
    assert {group.description for group in pipeline.groups} == {"mesh_pp"}
    assert {group.description for group in data.groups} == {"mesh_dp"}
    own_ms = 4 * (20 + 40)
    truth = 1 - own_ms / mean(_walls(run)) - _other_share(pipeline)
    assert pipeline.bubble_share == pytest.approx(truth, abs=POINTS)
    for path in traces(run):
        bare = strategies_of(read_trace(path, cache=False))
        assert any(isinstance(each, RankPipeline) for each in bare)


def _other_share(pipeline: Pipeline) -> float:
    return mean(stage.other_comm_ns / stage.step_ns for stage in pipeline.stages)
