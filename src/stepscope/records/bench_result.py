"""What `stepscope bench` measured: one record a workload, one file for all.

Names in JSON are those of the fields. None is "not captured" or "not known", never zero.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class WorkloadResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One workload in one size, with one set of remedies, on so many ranks."""

    name: str
    size: str
    status: Literal["measured", "failed", "not run"] = "measured"
    why: str | None = None  # it failed or was not run
    ranks: int = 1
    settings: dict[str, float | int | str] = {}  # the size's, with what --set changed
    remedies: tuple[str, ...] = ()
    samples: str = "samples"  # what a sample is: "images"
    samples_per_s: float | None = None  # of the whole job: the middle runs' mean
    low: float | None = None  # 95% interval of samples_per_s
    high: float | None = None
    step_ms: float | None = None  # mean of steady steps
    runs_ms: tuple[float, ...] = ()  # each run's mean step, in the order they ran; all of them
    steps_ms: tuple[tuple[float, ...], ...] = ()  # each run's steady steps, for later comparisons
    # Each run's mean step taken apart, on a processor in one process; empty where not captured.
    computing_ms: tuple[float, ...] = ()  # on a core
    queue_ms: tuple[float, ...] = ()  # ready, but others had the cores
    waiting_ms: tuple[float, ...] = ()  # of its own accord: sleep, files, locks, other processes
    calibration_ms: tuple[float, ...] = ()  # fixed arithmetic before each run: the machine's pace
    paced: tuple[float, ...] = ()  # each paced run's step over a yardstick timed in turns with it
    paced_computing: tuple[float, ...] = ()  # of these runs, by processor time instead
    mfu: float | None = None
    busy: float | None = None  # share of the step in which the device works
    cpu: float | None = None  # processor time over wall time and cores
    compute_share: dict[str, float] = {}  # of the peak by kind: "fp32", "tf32", "bf16", "tensor"
    counters: dict[str, float] = {}  # "sm_active", "occupancy", "tensor_active", where readable
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None  # of one rank, said before the run
    memory: dict[str, int] = {}  # bytes at the peak by category
    budget_ms: dict[str, float] = {}  # the step's parts; they add up to step_ms
    flops: float | None = None  # of one step and rank
    bytes_moved: float | None = None  # of one step and rank
    loss_first: float | None = None
    loss_last: float | None = None
    target_loss: float | None = None
    target_reached: bool | None = None
    steps_to_target: int | None = None
    time_to_target_s: float | None = None  # of training, without start-up
    # Beside the same workload without remedies, in turns: samples_per_s over its; 95% interval.
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    verdict: str | None = None
    notes: tuple[str, ...] = ()  # "tf32 was refused: it needs a CUDA device"
    folder: str | None = None  # the run that was explained
    seconds: float | None = None  # that all runs took


class BenchMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured: results of unlike machines are not compared silently."""

    host: str
    processor: str
    cores: int
    device: str | None = None
    devices: int = 0
    torch: str | None = None
    cuda: str | None = None
    python: str = ""
    clocks: dict[str, float] = {}  # MHz, before and after: "cpu_before", "sm_after", ...
    load: float | None = None  # of others on this machine when it began
    # The roofline's ceilings of one device: as calibrated, else from its data sheet.
    peak_flops: dict[str, float] = {}  # dtype -> FLOP/s
    peak_bytes_s: float | None = None  # memory traffic
    peak_source: str = ""


class StudyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One place of a study: so many samples a step and rank, on so many ranks."""

    batch: int
    ranks: int = 1
    samples_per_s: float | None = None  # of the whole job; None where it was not measured
    low: float | None = None
    high: float | None = None
    predicted_samples_per_s: float | None = None  # from a smaller place; None where that cannot be
    predicted_low: float | None = None
    predicted_high: float | None = None
    efficiency: float | None = None  # throughput a rank, over that on the fewest ranks
    why: str | None = None  # it was not measured: "needs 96 GB, 80 GB are free"


class ScalingStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of one workload against its batch and its ranks."""

    name: str  # of the workload
    size: str
    samples: str = "samples"
    points: tuple[StudyPoint, ...] = ()
    remedies: tuple[str, ...] = ()
    predicted_from: str | None = None  # the run folder: that of the first point
    saturates_at: int | None = None  # the batch from which doubling it gains less than 10%
    notes: tuple[str, ...] = ()  # why points have no prediction


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """The command of a saved file was run again (`bench --again`)."""

    started_unix: float
    host: str = ""
    stepscope: str = ""
    agrees: bool | None = None  # no workload surely differs; None: nothing could be compared
    differs: tuple[str, ...] = ()  # "gpt2: 6.1% slower"


class BenchResults(msgspec.Struct, frozen=True, kw_only=True):
    """The file that --save writes and --against reads."""

    schema: int = 1
    stepscope: str
    command: tuple[str, ...]  # what runs it again
    started_unix: float
    rules: dict[str, float | int | str | bool] = {}  # runs, dropped, warm_up, seeds...
    broken_rules: tuple[str, ...] = ()  # "only 1 run: no claim", "the machine was busy"
    machine: BenchMachine | None = None
    workloads: tuple[WorkloadResult, ...] = ()
    scaling: tuple[ScalingStudy, ...] = ()
    reruns: tuple[Rerun, ...] = ()  # empty: nobody has run this file's command again
