"""Workers, links and buckets from outlines: what replaying each combination says, without it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ddp_steps import calibration, cpu_trace, ddp_trace, gpu_trace
from msgspec.structs import replace

from benches import bench_for
from scaled_step import Local, Plan, predict_together
from stepscope import read_trace
from stepscope.predict.contracted_step import contract_step
from stepscope.predict.outcome import Refused
from stepscope.predict.scale_out import share_of_batch
from stepscope.predict.scaling_grid import CannotScale, find_scaling_setup
from stepscope.predict.stalls import StepStalls
from stepscope.predict.whatif import Bench
from stepscope.predict.whatifs import cuda_graphs, in_order, parse_setting
from stepscope.ui.html.whatif_scaling import ScalingCells, find_doubts

if TYPE_CHECKING:
    from scaled_step import Together
    from stepscope.predict.scaling_grid import ScalingSetup
    from stepscope.records.prediction import Prediction

BANDWIDTHS = (0.25, 1.0, 1.0, 8.0)
LOCALS: tuple[tuple[str, ...], ...] = (
    (), ("precision=bf16",), ("batch=x2", "optimizer=fused"), ("cuda-graphs",),
    ("compile", "batch=x0.5", "cuda-graphs"),
)  # fmt: skip


def local(
    bench: Bench, crew: ScalingSetup, settings: tuple[str, ...], share: float = 1.0
) -> Local | None:
    """With a share of the batch; None where a change refuses."""
    wanted = in_order([parse_setting(each) for each in settings])
    trial = bench.begin()
    for setting in wanted:
        if setting.name != "cuda-graphs":
            trial = bench.change(trial, setting)
    if bench.predict(wanted).refused:
        return None
    graphed = any(setting.name == "cuda-graphs" for setting in wanted)
    try:
        context = share_of_batch(trial.context, crew.before, share)
    except Refused:
        return None
    return Local(
        sketch=contract_step(crew, context),
        step_ns=trial.step_ns,
        variance=trial.variance,
        whole=contract_step(crew, trial.context) if share != 1.0 else None,
        graphed=contract_step(crew, context, graphed=True) if graphed else None,
        spread=cuda_graphs.apply(trial.context, "").spread if graphed else 0.0,
    )


def stalls_of(
    bench: Bench, crew: ScalingSetup, settings: tuple[str, ...], link: int, *, shared: bool
) -> tuple[float, float]:
    """As the page gets them."""
    trial = bench.begin()
    for setting in in_order([parse_setting(text) for text in settings]):
        if setting.name != "cuda-graphs":
            trial = bench.change(trial, setting)
    cell = ScalingCells(crew).make_cell(trial, (), 0.0, graphed=False)
    return cell.stalls[link][shared] if cell.stalls else (0.0, 0.0)


def both(
    bench: Bench, crew: ScalingSetup, known: Local, settings: tuple[str, ...], plan: Plan, how: str
) -> tuple[Together, Prediction] | None:
    """From the outline, and replayed; None where nothing is changed."""
    link, way = crew.links[plan.link], crew.ways[plan.way]
    asked = list(settings)
    if link.ranks != crew.before:
        asked.append(f"workers={link.ranks}{how}")
    if way.bucket_mb is not None:
        asked.append(f"bucket-mb={way.bucket_mb:g}")
    if plan.bandwidth != 1.0:
        asked.append(f"bandwidth={plan.bandwidth:g}")
    if len(asked) == len(settings):
        return None
    told = bench.predict([parse_setting(each) for each in asked])
    assert not told.refused
    return predict_together(crew, find_doubts(bench), known, plan), told


def agree(
    bench: Bench, *, many: int = 6, locals_: Any = LOCALS, within: float = 0.01, how: str = ""
) -> int:
    """Combinations drawn at random: the step within a percent, its interval within three."""
    rng = random.Random(7)
    crew = find_scaling_setup(bench)
    compared = 0
    for settings in locals_:
        for _ in range(many):
            link = rng.randrange(len(crew.links))
            share = crew.before / crew.links[link].ranks if how else 1.0
            known = local(bench, crew, settings, share)
            if known is None:
                continue
            stalled = stalls_of(bench, crew, settings, link, shared=bool(how))
            known = replace(known, stalls_ns=stalled[0], stalls_doubt_ns=stalled[1])
            alone = crew.links[link].ranks < 2
            plan = Plan(
                link=link,
                way=0 if alone else rng.randrange(len(crew.ways)),
                bandwidth=1.0 if alone else rng.choice(BANDWIDTHS),
            )
            pair = both(bench, crew, known, settings, plan, how)
            if pair is None:
                continue
            found, told = pair
            assert stalled[0] / 1e6 == pytest.approx(told.stall_ms)
            compared += 1
            assert found.step_ns / 1e6 == pytest.approx(told.predicted_ms, rel=within)
            assert found.low_ns / 1e6 == pytest.approx(told.low_ms, rel=0.03)
            assert found.high_ns / 1e6 == pytest.approx(told.high_ms, rel=0.03)
            assert found.done.host_ns / 1e6 == pytest.approx(told.host_ms, rel=within)
            assert found.done.device_ns / 1e6 == pytest.approx(told.device_ms, rel=within)
    return compared


def test_a_real_step_on_one_gpu(golden: Path) -> None:
    """With batch norms, whose statistics are sent before forward."""
    bench = bench_for(read_trace(golden / "h200-resnet18/rank-00000/trace.json.gz", cache=False))
    assert find_scaling_setup(bench).sent_bytes
    assert agree(bench) > 15
    assert agree(bench, how=":strong") > 12


def test_workers_that_differ(golden: Path) -> None:
    """The slowest of 256 takes some 1.2 times as long."""
    bench = bench_for(read_trace(golden / "h200-resnet18/rank-00000/trace.json.gz", cache=False))
    rng = random.Random(1)
    steps = [round(bench.corrected.step_ns * math.exp(rng.gauss(0, 0.07))) for _ in range(100)]
    bench.context = replace(bench.context, steps_ns=tuple(steps))
    assert max(link.straggling for link in find_scaling_setup(bench).links) > 1.15
    assert agree(bench, many=4) > 10


@pytest.mark.parametrize("how", ["", ":strong"])
def test_stalls_come_on_top_of_every_step(golden: Path, how: str) -> None:
    bench = bench_for(read_trace(golden / "h200-resnet18/rank-00000/trace.json.gz", cache=False))
    typical = bench.corrected.step_ns
    stalls = StepStalls(
        cost_ns={"data": 0.3 * typical, "evaluation": 0.2 * typical},
        steps=100,
        excess_ns={"data": np.ones(20), "evaluation": np.ones(2)},
        run_ns=0.5 * typical,
        deviation_ns=0.05 * typical,
    )
    bench.context = replace(bench.context, stalls=stalls)
    assert bench.predict([]).stall_ms > 0
    assert agree(bench, many=4, how=how) > 10


@pytest.mark.parametrize("lost", [None, 0.7])
def test_a_cpu_whose_cores_are_shared(lost: float | None, tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    bench = bench_for(trace, calibrations=(calibration(2, lost=lost),))
    assert find_scaling_setup(bench).links[3].beside
    assert agree(bench, many=20, locals_=((),)) > 10
    assert agree(bench, many=20, locals_=((),), how=":strong") > 10


def test_a_gpu_with_calibrated_links(tmp_path: Path) -> None:
    nccl = calibration(2, kind="cuda", device="NVIDIA H200", backend="nccl", us_per_mb=500)
    bench = bench_for(gpu_trace(tmp_path, [2048, 512]), calibrations=(nccl,))
    crew = find_scaling_setup(bench)
    assert [way.bucket_mb for way in crew.ways] == [None, 1, 5, 10]
    assert agree(bench, many=20, locals_=((), ("cuda-graphs",))) > 10


def test_a_job_that_exchanges_already(tmp_path: Path) -> None:
    """Its all-reduce keeps what it waits and moves its bytes at another pace."""
    nccl = calibration(2, kind="cuda", device="NVIDIA H200", backend="nccl", us_per_mb=100)
    bench = bench_for(ddp_trace(tmp_path, elements=1 << 20, dur=900), calibrations=(nccl,))
    crew = find_scaling_setup(bench)
    assert (crew.before, crew.retimed) == (2, True)
    assert agree(bench, many=20, locals_=((), ("batch=x2",))) > 10
    assert agree(bench, many=20, locals_=((), ("batch=x2",)), how=":strong") > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "h200/gpt2s_b8_bf16", "h200/gpt2s_b8_bf16_ddp1", "h200/gpt2s_b1_bf16_loop_sync",
        "third_party/a100_legacy_control", "third_party/a100_nccl_rank0of2",
        "third_party/mi300x_resnet_checkpoint_rank0of8", "third_party/pair_rank0of128",
    ],
)  # fmt: skip
def test_steps_of_every_kind(name: str, shared: Path) -> None:
    """One GPU, DDP over one rank, waits every step, several streams that wait for one another."""
    bench = bench_for(read_trace(shared / f"traces/{name}.json.gz", cache=False))
    assert agree(bench) > 15
    assert agree(bench, how=":strong") > 5


def test_what_cannot_be_known_says_what_to_do(tmp_path: Path) -> None:
    bench = bench_for(cpu_trace(tmp_path, [512, 512]))
    with pytest.raises(CannotScale, match="stepscope calibrate --ranks 2"):
        find_scaling_setup(bench)


def test_bucket_sizes_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    """Three gradients of a MiB: in one bucket each, or all in one."""
    bench = bench_for(cpu_trace(tmp_path, [512, 512]), calibrations=(calibration(2),))
    ways = find_scaling_setup(bench).ways
    assert [(way.bucket_mb, len(way.size_bytes)) for way in ways] == [(None, 2), (1, 3), (5, 1)]
