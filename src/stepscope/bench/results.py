"""What `stepscope bench` measured and predicted: one record per workload, changes against
saved results, and the memory that a workload will need.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.comparison import PartChange

# Names in JSON are those of the fields. None is "not captured" or "not known", never zero.


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


# A bench against saved results: how far each workload's step is from the base's, and how sure.

ChangeVerdict = Literal["slower", "faster", "no difference seen", "not comparable"]


class StepPartChange(msgspec.Struct, frozen=True, kw_only=True):
    """How long the step computes, or waits of its own accord, beside the base."""

    base_ms: float
    now_ms: float
    change: float  # of waiting, as a share of the step; of computing, as a share of itself
    low: float
    high: float
    smallest_detectable: float  # the change that is found in 4 of 5 cases


class WorkloadChange(msgspec.Struct, frozen=True, kw_only=True):
    """One workload now against the base. Changes are shares of the base's step: 0.05 is slower."""

    name: str
    size: str
    ranks: int = 1
    remedies: tuple[str, ...] = ()
    verdict: ChangeVerdict
    why: str | None = None  # it is not comparable
    base_ms: float | None = None
    now_ms: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    smallest_detectable: float | None = None  # the change that is found in 4 of 5 cases
    base_runs: int = 0
    now_runs: int = 0
    parts: tuple[PartChange, ...] = ()  # of the budget, the largest change first; a is the base
    waiting: StepPartChange | None = None  # None: not captured on both sides
    computing: StepPartChange | None = None  # without the machine's own pace, where that is known
    base_others: float | None = None  # share of the step in which other programs had the cores
    now_others: float | None = None
    # What made the verdict: the whole step, or waiting, with computing where that surely changed.
    decided_by: Literal["step", "waiting"] = "step"
    counted_change: float | None = None  # of the step, by what decided
    counted_low: float | None = None
    counted_high: float | None = None
    paced: bool = False  # measured beside a yardstick: the machine's own pace is not in the change
    machine_changed: bool = False  # surely, and by as much as the step did
    pace_change: float | None = None  # of the machine: now over then
    notes: tuple[str, ...] = ()


class BenchComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All workloads of a bench against saved results."""

    against: str  # the file or the run folder
    base_started_unix: float
    confidence: float  # that all intervals together hold
    workloads: tuple[WorkloadChange, ...] = ()
    not_run: tuple[str, ...] = ()  # in the base only
    notes: tuple[str, ...] = ()


# The memory that a workload will need, predicted before it runs.

LIMIT_S = 90.0  # that a prediction may take
_MARGIN = 0.02  # of free memory: rounding and fragments
# From shapes alone, from two real steps, or from a straight line through smaller real ones.
Method = Literal["shapes", "trained", "smaller batches"]


class PeakRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which training is asked about: a workload in a size, with changed settings."""

    name: str
    size: str
    changes: dict[str, str] = {}
    ranks: int = 1


class PredictedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; None is "not known"."""

    peak_bytes: int | None = None  # of one rank, as torch's allocator counts
    device: str = "cpu"  # or "cuda"
    free_bytes: int | None = None  # of the host for all its ranks, or of one GPU for its rank
    ranks: int = 1
    batch: int | None = None  # of one rank
    fitting_batch: int | None = None  # if `batch` does not fit: the largest found that does
    method: Method = "shapes"
    notes: tuple[str, ...] = ()

    @property
    def room_bytes(self) -> int | None:
        """That one rank may take."""
        if self.free_bytes is None:
            return None
        sharing = self.ranks if self.device == "cpu" else 1
        return int(self.free_bytes * (1 - _MARGIN)) // sharing

    @property
    def fits(self) -> bool | None:
        """None if that is not known."""
        if self.peak_bytes is None or self.room_bytes is None:
            return None
        return self.peak_bytes <= self.room_bytes
