"""Results of a bench that nobody ran: plausible numbers, the same for the same seed."""

from __future__ import annotations

import math
import random
from typing import Any

from msgspec.structs import replace

from stepscope.bench.results import (
    BenchMachine,
    BenchResults,
    ScalingStudy,
    StudyPoint,
    WorkloadResult,
)

# name, samples, batch, step ms, MFU, busy, FLOPs per byte, GB at the peak, where memory goes
_KINDS: tuple[tuple[str, str, int, float, float, float, float, float, str], ...] = (
    ("resnet50", "images", 64, 74.0, 0.41, 0.97, 62.0, 7.1, "activations"),
    ("inception-v3", "images", 64, 98.0, 0.36, 0.96, 55.0, 8.4, "activations"),
    ("vgg16", "images", 64, 121.0, 0.62, 0.99, 130.0, 9.9, "activations"),
    ("mobilenet-v3", "images", 128, 61.0, 0.08, 0.88, 12.0, 9.0, "activations"),
    ("nmt-lstm", "sentences", 128, 92.0, 0.11, 0.44, 28.0, 3.2, "activations"),
    ("transformer", "sentences", 128, 55.0, 0.38, 0.93, 88.0, 6.3, "activations"),
    ("bert-medium", "texts", 64, 33.0, 0.43, 0.95, 92.0, 4.1, "activations"),
    ("bert-large", "texts", 16, 181.0, 0.55, 0.99, 150.0, 17.2, "optimizer"),
    ("gpt2", "texts", 8, 96.0, 0.49, 0.97, 110.0, 8.8, "optimizer"),
    ("mixture-of-experts", "texts", 8, 71.0, 0.21, 0.72, 60.0, 14.0, "optimizer"),
    ("mask-rcnn", "images", 4, 210.0, 0.19, 0.61, 40.0, 9.1, "activations"),
    ("efficientdet", "images", 8, 160.0, 0.06, 0.58, 14.0, 6.6, "activations"),
    ("deep-speech2", "utterances", 16, 240.0, 0.09, 0.39, 25.0, 7.7, "activations"),
    ("ncf", "ratings", 65536, 3.4, 0.02, 0.71, 3.0, 1.2, "parameters"),
    ("dlrm", "clicks", 2048, 5.2, 0.012, 0.52, 1.4, 5.5, "parameters"),
    ("wgan-gp", "images", 64, 88.0, 0.12, 0.67, 30.0, 2.4, "activations"),
    ("dcgan", "images", 128, 21.0, 0.24, 0.81, 45.0, 1.6, "activations"),
    ("pointnet", "clouds", 32, 14.0, 0.15, 0.77, 20.0, 1.9, "activations"),
    ("pointnet-seg", "clouds", 32, 39.0, 0.17, 0.84, 21.0, 4.7, "activations"),
    ("actor-critic", "frames", 256, 8.8, 0.004, 0.12, 6.0, 0.3, "parameters"),
    ("minigo", "positions", 128, 27.0, 0.07, 0.35, 18.0, 0.9, "activations"),
    ("long-rnn", "sequences", 32, 310.0, 0.03, 0.22, 9.0, 0.8, "activations"),
    ("graph-attention", "nodes", 4096, 12.0, 0.05, 0.49, 2.2, 2.2, "activations"),
    ("diffusion-unet", "images", 16, 143.0, 0.33, 0.94, 58.0, 11.3, "activations"),
)
H200 = BenchMachine(
    host="node-7",
    processor="Intel(R) Xeon(R) Platinum 8468",
    cores=16,
    device="NVIDIA H200",
    devices=1,
    torch="2.11.0",
    cuda="13.0",
    python="3.12.3",
    clocks={"sm_before": 1980.0, "sm_after": 1965.0},
    load=0.1,
    peak_flops={"fp32": 66.9e12, "tf32": 494e12, "bf16": 989e12},
    peak_bytes_s=4.8e12,
    peak_source="NVIDIA H200 data sheet",
)
RULES: dict[str, float | int | str | bool] = {
    "runs": 5,
    "runs_for_a_claim": 5,
    "dropped": 2,
    "interleaved": True,
    "seed": 0,
}
_REST = ("gradients", "buffers", "temporaries", "other")


def made_workload(place: int = 0, *, seed: int = 0, **changes: Any) -> WorkloadResult:
    """The place-th kind of workload; beyond the last kind the names get numbers."""
    name, samples, batch, step_ms, mfu, busy, intensity, gigabytes, largest = _KINDS[
        place % len(_KINDS)
    ]
    again = place // len(_KINDS)
    draw = random.Random(1000 * seed + place)
    step_ms *= draw.uniform(0.97, 1.03)
    rate = batch / step_ms * 1e3
    spread = draw.uniform(0.004, 0.03)
    runs = tuple(step_ms * draw.gauss(1.0, spread) for _ in range(5))
    flops = mfu * H200.peak_flops["fp32"] * step_ms / 1e3
    first = draw.uniform(2.0, 7.0)
    target = first * draw.uniform(0.3, 0.7)
    steps = draw.randint(12, 60)
    result = WorkloadResult(
        name=f"{name}-{again + 1}" if again else name,
        size="small",
        settings={"batch": batch, "lr": 1e-3},
        samples=samples,
        samples_per_s=rate,
        low=rate * (1 - spread),
        high=rate * (1 + spread),
        step_ms=step_ms,
        runs_ms=runs,
        mfu=mfu,
        busy=busy,
        cpu=draw.uniform(0.06, 0.4),
        compute_share={"fp32": mfu},
        peak_bytes=int(gigabytes * 1e9),
        memory=_memory(int(gigabytes * 1e9), largest, draw),
        budget_ms=_budget(step_ms, busy, draw),
        flops=flops,
        bytes_moved=flops / intensity,
        loss_first=first,
        loss_last=target * draw.uniform(0.6, 0.95),
        target_loss=target,
        target_reached=True,
        steps_to_target=steps,
        time_to_target_s=steps * step_ms / 1e3,
        verdict=_verdict(busy),
        folder=f"bench/{name}/run-1",
        seconds=draw.uniform(8.0, 40.0),
    )
    return replace(result, **changes)


def made_results(many: int = 24, *, seed: int = 0, **changes: Any) -> BenchResults:
    """So many workloads on one H200; a few are as bad as in life when `many` is over ten."""
    workloads = [made_workload(place, seed=seed) for place in range(many)]
    if many > 10:
        workloads[5] = replace(workloads[5], mfu=None, flops=None, compute_share={})
        workloads[7] = failed(workloads[7], "exit code 1: CUDA out of memory, 2.10 GB wanted")
        workloads[9] = replace(
            workloads[9], target_reached=False, steps_to_target=None, time_to_target_s=None,
            loss_last=(workloads[9].target_loss or 0.0) * 1.2,
        )  # fmt: skip
        why = "needs 161 GB, 141 GB are free; batch 12 would fit"
        workloads[10] = failed(workloads[10], why, status="not run")
    results = BenchResults(
        stepscope="0.19.0",
        command=("stepscope", "bench", "--size", "small", "--save", "base.json"),
        started_unix=1_794_841_200.0,
        rules=RULES,
        machine=H200,
        workloads=tuple(workloads),
    )
    return replace(results, **changes)


def failed(workload: WorkloadResult, why: str, *, status: Any = "failed") -> WorkloadResult:
    """As it is written down when nothing was measured."""
    return WorkloadResult(
        name=workload.name,
        size=workload.size,
        status=status,
        why=why,
        settings=workload.settings,
        samples=workload.samples,
    )


def made_study(name: str = "gpt2", *, batches: int = 6, ranks: tuple[int, ...] = (1, 2, 4)) -> Any:
    """Throughput that saturates with the batch and grows less than the ranks."""
    points = []
    for many in ranks:
        for power in range(batches):
            batch = 4 * 2**power
            rate = 900 * many**0.9 * batch / (batch + 24)
            promise = rate * (1.04 if many > 1 else 1.02)
            first = power == 0 and many == ranks[0]
            points.append(
                StudyPoint(
                    batch=batch,
                    ranks=many,
                    samples_per_s=rate,
                    low=rate * 0.98,
                    high=rate * 1.02,
                    predicted_samples_per_s=None if first else promise,
                    predicted_low=None if first else promise * 0.9,
                    predicted_high=None if first else promise * 1.12,
                )
            )
    beyond = StudyPoint(batch=4 * 2**batches, ranks=1, why="needs 161 GB, 141 GB are free")
    return ScalingStudy(
        name=name, size="small", samples="texts", points=(*points, beyond), saturates_at=64
    )


def _memory(peak: int, largest: str, draw: random.Random) -> dict[str, int]:
    states = {"parameters": 0.12, "optimizer": 0.2, "activations": 0.35}
    states[largest] += 0.25
    rest = {name: draw.uniform(0.005, 0.06) for name in _REST}
    whole = math.fsum((*states.values(), *rest.values()))
    memory = {name: int(peak * part / whole) for name, part in (states | rest).items()}
    memory["other"] += peak - sum(memory.values())
    return memory


def _budget(step_ms: float, busy: float, draw: random.Random) -> dict[str, float]:
    idle = 1 - busy
    copies = draw.uniform(0.0, 0.06)
    cuts = sorted(draw.uniform(0, idle) for _ in range(3))
    gaps = [b - a for a, b in zip([0.0, *cuts], [*cuts, idle], strict=True)]
    shares = {"compute": busy - copies, "exposed_memory": copies}
    shares |= dict(zip(("data_loading", "operators", "python", "idle_launch"), gaps, strict=True))
    return {name: step_ms * share for name, share in shares.items()}


def _verdict(busy: float) -> str:
    if busy > 0.9:
        return "the GPU is busy: faster kernels or fewer FLOPs are what is left"
    return (
        f"the GPU has nothing queued for {1 - busy:.0%} of the step: the host launches too slowly"
    )
