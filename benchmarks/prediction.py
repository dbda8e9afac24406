"""How accurate predictions are: corrected steps and what-ifs against measurements.

    python benchmarks/prediction.py [FOLDER ...] [--json FILE] [--fit]

A FOLDER holds traces and a truth.json with the steps measured without the profiler in the same
process (../shared/traces/h200, or the output of record_models.py). There are two tables: the
corrected step next to the naive answer (the recorded step), and every what-if whose outcome was
measured, from the bare trace and from the trace with its measured step, as a run folder has it.
`--fit` fits the constants of step/correct.py again with each model left out in turn, and
prints the error on that model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import parse_setting, predict_change
from stepscope.records.rank import MeasuredSteps, RankInputs
from stepscope.step.correct import (
    WITH_SHAPES,
    Rates,
    find_slowness,
    launch_slowness,
    scale_host,
    without_profiler,
)
from stepscope.step.graph import Phase, typical_step
from stepscope.step.replay import STEPS, replay, step_ns
from stepscope.step.steps import find_steps
from stepscope.step.work import find_work
from stepscope.trace.read import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.trace import Trace
    from stepscope.step.graph import StepGraph

SHARED = Path(__file__).parent.parent.parent / "shared/traces/h200"
# From, what-ifs, to; `other` if the two were recorded on two machines of one kind.
CASES = (
    ("gpt2s_b8_fp32", "precision=tf32", "gpt2s_b8_tf32"),
    ("gpt2s_b8_fp32", "precision=bf16", "gpt2s_b8_bf16"),
    ("vitb16_b64_fp32", "precision=bf16", "vitb16_b64_bf16"),
    ("gpt2s_b8_bf16", "optimizer=fused", "gpt2s_b8_bf16_fused"),
    ("mlp_b32_fp32_loop", "optimizer=fused", "mlp_b32_fp32_fused"),
    ("gpt2s_b4_fp32", "batch=8", "gpt2s_b8_fp32"),
    ("gpt2s_b4_fp32", "batch=16", "gpt2s_b16_fp32"),
    ("gpt2s_b8_fp32", "batch=4", "gpt2s_b4_fp32"),
    ("gpt2s_b8_fp32", "batch=16", "gpt2s_b16_fp32"),
    ("gpt2s_b16_fp32", "batch=4", "gpt2s_b4_fp32"),
    ("gpt2s_b16_fp32", "batch=8", "gpt2s_b8_fp32"),
    ("gpt2s_b4_fp32", "batch=2", "gpt2s_b2_fp32"),
    ("gpt2s_b8_bf16", "cuda-graphs", "gpt2s_b8_bf16_graph"),
    ("mlp_b32_fp32_fused", "cuda-graphs", "mlp_b32_fp32_graph"),
    ("gpt2s_b8_bf16", "checkpoint=blocks", "gpt2s_b8_bf16_ckpt"),
)
# The what-if from record_models.py's baseline to each of its configurations.
OF_CONFIGURATION = {
    "tf32": "precision=tf32",
    "bf16": "precision=bf16",
    "fused": "optimizer=fused",
    "x2": "batch=x2",
    "graph": "cuda-graphs",
    "ckpt": "checkpoint=blocks",
}
TASKS, REPLAYS = 50_000, 20
SIGN = 0.05  # a measured change above this must have the predicted sign


class Recorded(NamedTuple):
    name: str
    file: Path | None
    truth: dict[str, Any]

    @property
    def model(self) -> str:
        return self.name.partition("_")[0]

    @property
    def ms(self) -> float:
        """Steps back to back; synchronised ones if the script itself synchronises."""
        kind = "synced" if self.truth.get("sync_each") else "pipelined"
        return float(self.truth[f"step_ms_{kind}"])

    def measured(self) -> MeasuredSteps:
        """As a run folder has it, with the host's time if that was recorded."""
        ns = round(self.ms * 1e6)
        host = {name: round(ms * 1e6) for name, ms in (self.truth.get("host_ms") or {}).items()}
        return MeasuredSteps(
            steps=20,
            steps_ns=(ns,),
            step_ns=ns,
            wall_ns=ns,
            device_ns=None,
            phases_ns={},
            host_ns=host,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[SHARED])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    recorded = {one.name: one for folder in options.folders for one in _read(folder)}
    if not recorded:
        sys.exit(f"no truth.json in {', '.join(map(str, options.folders))}")
    traces = {name: read_trace(one.file) for name, one in recorded.items() if one.file}
    result = {"steps": _steps(recorded, traces), "whatifs": _whatifs(recorded, traces)}
    result["replay"] = _speed(traces)
    if options.fit:
        result["left_out"] = _left_out(recorded, traces)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def _read(folder: Path) -> Iterator[Recorded]:
    file = folder / "truth.json"
    for name, truth in json.loads(file.read_text()).items() if file.exists() else ():
        trace = folder / f"{name}.json.gz"
        yield Recorded(name, trace if trace.exists() else None, truth)


def _bench(trace: Trace, **inputs: Any) -> Bench:
    return Bench(RankAnalysis(RankInputs(trace=trace, **inputs)))


# The corrected step


def _steps(recorded: dict[str, Recorded], traces: dict[str, Trace]) -> list[dict[str, Any]]:
    print(f"{'trace':28} {'profiled':>9} {'corrected':>10} {'95%':>16} {'truth':>8}   naive   ours")
    rows = []
    for name, trace in traces.items():
        bench = _bench(trace)
        found, truth = bench.corrected, recorded[name].ms
        naive, ours = bench.profiled_ns / 1e6 / truth - 1, found.step_ns / 1e6 / truth - 1
        rows.append({"name": name, "naive": naive, "ours": ours})
        span = f"{found.low_ns / 1e6:.1f} to {found.high_ns / 1e6:.1f}"
        print(
            f"{name:28} {bench.profiled_ns / 1e6:9.2f} {found.step_ns / 1e6:10.2f} {span:>16} "
            f"{truth:8.2f} {naive:+7.1%} {ours:+6.1%}"
        )
    _means(rows, "naive", "ours")
    return rows


# What-ifs


def _whatifs(recorded: dict[str, Recorded], traces: dict[str, Trace]) -> list[dict[str, Any]]:
    print(f"\n{'from':20} {'what-if':20} {'truth':>8} {'bare':>8} {'error':>7} {'95%':>16}", end="")
    print(f" {'measured':>9} {'error':>7}   no change")
    rows = []
    for source, setting, target in _cases(recorded):
        if source not in traces or target not in recorded:
            continue
        truth, before = recorded[target].ms, recorded[source].ms
        bare = _bench(traces[source]).predict([parse_setting(setting)])
        known = _bench(traces[source], measured=recorded[source].measured()).predict(
            [parse_setting(setting)]
        )
        errors = [found.predicted_ms / truth - 1 for found in (bare, known)]
        change = truth / before - 1
        wrong = abs(change) > SIGN and (change > 0) != (known.predicted_ms > known.baseline_ms)
        rows.append({"from": source, "whatif": setting, "bare": errors[0], "measured": errors[1]})
        rows[-1] |= {"no_change": before / truth - 1, "wrong_sign": wrong}
        rows[-1] |= {"inside": bare.low_ms <= truth <= bare.high_ms}
        rows[-1] |= {"measured_inside": known.low_ms <= truth <= known.high_ms}
        span = f"{bare.low_ms:.1f} to {bare.high_ms:.1f}"
        print(
            f"{source:20} {setting:20} {truth:8.2f} {bare.predicted_ms:8.2f} {errors[0]:+7.1%} "
            f"{span:>16} {known.predicted_ms:9.2f} {errors[1]:+7.1%}   {before / truth - 1:+.0%}"
            f"{'  WRONG SIGN' if wrong else ''}{'  ' + bare.refused[0] if bare.refused else ''}"
        )
    _means(rows, "bare", "measured", "no_change")
    inside, known = (sum(row[name] for row in rows) for name in ("inside", "measured_inside"))
    print(f"{inside} of {len(rows)} outcomes inside the bare trace's interval, {known} inside the")
    print("one from the measured step")
    return rows


def _cases(recorded: dict[str, Recorded]) -> Iterator[tuple[str, str, str]]:
    yield from CASES
    for name in recorded:
        model, _, words = name.partition("_")
        if words in OF_CONFIGURATION:
            yield f"{model}_fp32", OF_CONFIGURATION[words], name
            if words == "fused" and f"{model}_loop" in recorded:
                yield f"{model}_loop", "optimizer=fused", name
        base, _, change = words.partition("-")
        if base in ("bf16", "sgd") and change in OF_CONFIGURATION:
            yield f"{model}_{base}", OF_CONFIGURATION[change], name
            if change == "fused" and f"{model}_{base}-loop" in recorded:
                yield f"{model}_{base}-loop", "optimizer=fused", name


def _means(rows: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        errors = np.abs([row[name] for row in rows])
        print(f"{name:10} mean error {errors.mean():.1%}, worst {errors.max():.1%} of {len(rows)}")


# The scheduler


def _speed(traces: dict[str, Trace]) -> dict[str, float]:
    """A step of 50,000 calls and tasks: micro-batches of the largest one until it is as large."""
    bench = max(
        (_bench(trace) for trace in traces.values()), key=lambda one: one.context.graph.size
    )
    graph, times = bench.context.graph, 1
    while graph.size < TASKS:
        times *= 2
        graph = predict_change("accumulate", bench.context, str(times)).context.graph
    found: dict[str, float] = {"tasks": graph.size}
    for name, run, steps in (("every task", replay, 1), ("the step alone", step_ns, STEPS)):
        took = []
        for _ in range(REPLAYS):
            began = time.perf_counter()
            run(graph)
            took.append(time.perf_counter() - began)
        found[name] = steps / statistics.median(took)
        print(f"{graph.size:,} calls and tasks replayed {found[name]:.0f} times a second: {name}")
    return found


# The constants


class Case(NamedTuple):
    """A trace as the fit uses it: the host's time by phase, and the device's time alone."""

    recorded: Recorded
    graph: StepGraph
    slow: float
    launches: tuple[float, ...]
    host_ms: Any
    floor_ms: float


def _left_out(recorded: dict[str, Recorded], traces: dict[str, Trace]) -> list[dict[str, Any]]:
    cases = [case for name, trace in traces.items() if (case := _case(recorded[name], trace))]
    rows = []
    print("\nconstants fitted without a model, and the error on its traces")
    for model in sorted({case.recorded.model for case in cases}):
        rates = _fit([case for case in cases if case.recorded.model != model])
        for case in cases:
            if case.recorded.model == model:
                graph = without_profiler(case.graph, rates, case.slow, case.launches)
                error = step_ns(graph) / 1e6 / case.recorded.ms - 1
                rows.append({"name": case.recorded.name, "error": error})
        print(f"{model:10} {_told(rates)}")
    _means(rows, "error")
    print(f"all        {_told(_fit(cases))}")
    return rows


def _told(rates: Rates) -> str:
    return f"host {rates.host:.2f}, slowness {rates.slowness:.1f}, launch {rates.launch:.1f}"


def _case(one: Recorded, trace: Trace) -> Case | None:
    work = find_work(trace)
    graph = typical_step(trace, work, find_steps(trace, work)).graph
    slow = find_slowness(trace)
    if not slow:
        return None
    calls = graph.calls
    light = calls.gap_ns + calls.call_ns - WITH_SHAPES.frame_ns / WITH_SHAPES.host * calls.frames
    host = np.bincount(calls.phase, light, len(Phase)) / 1e6
    floor = step_ns(scale_host(graph, 0.0)) / 1e6
    return Case(one, graph, slow, launch_slowness(graph, trace), host, floor)


def _fit(cases: list[Case]) -> Rates:
    """Least squares of the logarithm over a grid. Device-bound steps have no influence, and no
    single trace has much."""
    best, found = np.inf, WITH_SHAPES
    truth = np.log([case.recorded.ms for case in cases])
    floor = np.array([case.floor_ms for case in cases])
    slow, launches, host_ms = (
        np.array(column)
        for column in zip(*((c.slow, c.launches, c.host_ms) for c in cases), strict=True)
    )
    for host, power, launch in itertools.product(
        np.arange(0.5, 0.85, 0.01), np.arange(-0.8, 0.01, 0.1), np.arange(-1.0, 0.01, 0.1)
    ):
        steps = host * slow**power * (host_ms * launches**launch).sum(axis=1)
        errors = np.log(np.maximum(steps, floor)) - truth
        loss = float(np.minimum(errors**2, 0.3**2).sum())
        if loss < best:
            best = loss
            found = Rates(host=float(host), slowness=float(power), launch=float(launch))
    return found


if __name__ == "__main__":
    main()
