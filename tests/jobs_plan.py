"""The plan of a simulated job, its process groups, and random plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.records.job import KINDS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Form = Literal["ddp", "tensor", "fsdp", "mixed", "gpipe", "1f1b"]
Backend = Literal["nccl", "gloo"]
FaultCause = Literal["compute", "input", "link", "stage"]

FORMS: tuple[Form, ...] = ("ddp", "tensor", "fsdp", "mixed", "gpipe", "1f1b")
PIPELINES = ("gpipe", "1f1b")
ABSENT = -1
LABELS = ("forward", "backward", "optimizer")
KIND = {name: code for code, name in enumerate(KINDS)}
ALPHA_NS = {"nccl": 25e3, "gloo": 150e3}
BETA_NS = {"nccl": 0.1, "gloo": 1.0}  # per byte
SIZE_BYTES = {"nccl": 25_000_000, "gloo": 3_000_000}
CALL_NS = {"nccl": 0.0, "gloo": 30e3}  # a call's time on the caller's thread
PICKUP_NS = {"nccl": 0.0, "gloo": 40e3}  # from the call to the worker's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong from the first step to the last.

    compute: the rank's compute takes `size` times as long. input: its wait for data grows by `size`
    of a healthy step. link: transfers in one group take `size` times as long. stage: all ranks of a
    pipeline's stage compute `size` times as long.
    """

    cause: FaultCause
    size: float
    place: int  # a rank, a group's index in its layer, or a stage
    layer: str = ""  # for a link: which groups, as Layer.description


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that determines a job; equal plans give equal jobs."""

    ranks: int
    steps: int = 8
    form: Form = "ddp"
    backend: Backend = "nccl"
    seed: int = 0
    compute_ns: float = 100e6
    input_ns: float = 1e6
    other_ns: float = 0.5e6  # on the host, while nothing runs
    collectives: int = 6  # buckets, or layers, per step
    size_bytes: int | None = None
    tensor_ranks: int = 4
    stages: int = 4
    microbatches: int = 8
    broadcast: bool = False
    noise: float = 0.01  # of each rank's compute in each step, relative, lognormal
    common: float = 0.0  # the same, but shared by all ranks
    spread: float = 0.0  # of each rank's compute, in all steps
    transients: int = 0  # ranks with one step that takes 1.5 times as long
    transfer_noise: float = 0.05
    offset_ns: float = 1e6  # clocks differ by up to this
    drift_ppm: float = 0.0
    reading_ns: float = 0.0  # each time read is wrong by up to this
    rounds: int = 0  # clock rounds before the window, and as many after it
    tell_ranks: bool = True
    tell_sequence: bool = True
    fault: Fault | None = None
    jump: tuple[int, float] | None = None  # (rank, ns): this rank's clock is set in mid-window

    @property
    def replicas(self) -> int:
        """Pipelines in parallel."""
        return self.ranks // self.stages


@dataclass(frozen=True, slots=True)
class Layer:
    """Groups of one purpose that divide all ranks: row g has the members of group g."""

    description: str
    members: NDArray[np.intp]
    first: int  # its first group's place among all groups
    of_rank: NDArray[np.intp]

    @classmethod
    def of(cls, description: str, members: NDArray[np.intp], first: int) -> Layer:
        of_rank = np.empty(members.size, np.intp)
        of_rank[members] = np.arange(len(members))[:, None]
        return cls(description, members, first, of_rank)

    @property
    def size(self) -> int:
        return int(self.members.shape[1])


def size_of(plan: Plan, share: float = 1.0) -> int:
    """Bytes of a collective with this share of the plan's size, divisible by any group size."""
    size = plan.size_bytes if plan.size_bytes is not None else SIZE_BYTES[plan.backend]
    return max(1, round(size * share / 4096)) * 4096


def layers_of(plan: Plan) -> tuple[Layer, ...]:
    """The process groups of a job."""
    everyone = np.arange(plan.ranks)
    world = Layer.of("default_pg", everyone[None, :], 0)
    if plan.form in ("ddp", "fsdp"):
        return (world,)
    if plan.form in PIPELINES:
        names, grid = ("mesh_dp", "mesh_pp"), everyone.reshape(plan.stages, -1)
    else:
        names, grid = ("mesh_tp", "mesh_dp"), everyone.reshape(-1, plan.tensor_ranks)
    return (world, Layer.of(names[0], grid, 1), Layer.of(names[1], grid.T, 1 + len(grid)))


def group_name(layers: tuple[Layer, ...], description: str, place: int) -> str:
    """The name that torch would give a layer's group."""
    return str(next(each.first for each in layers if each.description == description) + place)


def draw_plan(
    seed: int,
    ranks: int,
    *,
    noise: float | None = None,
    steps: int | None = None,
    faulty: bool = False,
    cause: FaultCause | None = None,
    halves: bool = False,
    **fixed: Any,
) -> Plan:
    """A random job of that many ranks: healthy, or with one fault that can be identified.

    A slow part can be identified when slow parts are the minority. `halves` draws faults where they
    are not: one of two stages, or of two groups.
    """
    draw = np.random.default_rng([seed, ranks, 7])
    wanted = cause or (_draw_cause(draw, ranks) if faulty else None)
    plan = Plan(
        ranks=ranks,
        steps=int(draw.integers(3, 21)) if steps is None else steps,
        form=_draw_form(draw, ranks, wanted),
        backend="gloo" if ranks <= 64 and draw.random() < 0.3 else "nccl",
        seed=seed,
        compute_ns=float(np.exp(draw.uniform(np.log(20e6), np.log(400e6)))),
        collectives=int(draw.integers(3, 11)),
        tensor_ranks=_draw_divisor(draw, ranks, (2, 4, 8)),
        stages=_draw_divisor(draw, ranks, (2, 4, 8)),
        microbatches=int(draw.integers(4, 10)),
        broadcast=bool(draw.random() < 0.2),
        noise=float(draw.choice([0.01, 0.05])) if noise is None else noise,
        common=float(draw.choice([0.0, 0.05, 0.2])),
        spread=float(draw.choice([0.0, 0.005])),
        transients=int(draw.integers(0, 3)) if wanted is None else 0,
        offset_ns=float(10 ** draw.uniform(3, np.log10(30e9))),
        drift_ppm=float(draw.choice([0.0, 1.0, 10.0, 50.0])),
        reading_ns=float(draw.choice([0.0, 900.0])),
        rounds=50 if ranks <= 512 and draw.random() < 0.5 else 0,
        tell_ranks=bool(draw.random() < 0.7),
        tell_sequence=bool(draw.random() < 0.7),
    )
    share = float(draw.uniform(0.15, 0.4)) + 0.15 * (wanted == "link")
    plan = replace(
        plan,
        input_ns=plan.compute_ns * float(draw.uniform(0.002, 0.03)),
        size_bytes=_size_for(plan, share),
    )
    plan = replace(plan, **fixed)
    return plan if wanted is None else _with_fault(draw, plan, wanted, halves)


def _size_for(plan: Plan, share: float) -> int:
    """A size at which a step's transfers take about this share of its compute."""
    units = {"fsdp": 3.0, "tensor": 1.5, "mixed": 1.25}.get(plan.form, 1.0) * plan.collectives
    return int(share * plan.compute_ns / (BETA_NS[plan.backend] * units)) // 64 * 64


def _draw_cause(draw: np.random.Generator, ranks: int) -> FaultCause:
    causes: list[FaultCause] = ["compute", "compute", "input"]
    if ranks >= 4:
        causes.append("stage")
    if ranks >= 8:
        causes.append("link")
    return causes[int(draw.integers(len(causes)))]


def _draw_form(draw: np.random.Generator, ranks: int, cause: FaultCause | None) -> Form:
    if cause == "link":  # only siblings show it
        return "tensor" if draw.random() < 0.5 else "mixed"
    if cause == "stage":
        return "gpipe" if draw.random() < 0.5 else "1f1b"
    forms = FORMS if ranks >= 4 else ("ddp", "fsdp", "gpipe", "1f1b")
    return forms[int(draw.integers(len(forms)))]


def _draw_divisor(draw: np.random.Generator, ranks: int, among: tuple[int, ...]) -> int:
    """Ranks per group, with at least two groups if possible."""
    fitting = [size for size in among if ranks % size == 0 and ranks >= 2 * size]
    return int(draw.choice(fitting)) if fitting else min(ranks, *among)


def _with_fault(draw: np.random.Generator, plan: Plan, cause: FaultCause, halves: bool) -> Plan:
    if cause == "link":
        return _with_slow_link(draw, plan, halves)
    size = float(draw.uniform(0.15, 0.6) if cause == "input" else draw.uniform(1.15, 1.6))
    places = plan.ranks
    if cause == "input" and plan.form in PIPELINES:  # only the first stage loads
        places = plan.replicas
    if cause == "stage":
        few = max(4, plan.stages) if plan.ranks % max(4, plan.stages) == 0 else plan.ranks
        plan = replace(plan, stages=2 if halves else few)
        places = plan.stages
    fault = Fault(cause=cause, size=size, place=int(draw.integers(places)))
    return replace(plan, fault=fault)


def _with_slow_link(draw: np.random.Generator, plan: Plan, halves: bool) -> Plan:
    if halves:
        plan = replace(plan, tensor_ranks=plan.ranks // 2)
    elif plan.ranks < 3 * plan.tensor_ranks:
        plan = replace(plan, tensor_ranks=2)
    counts = {"mesh_tp": plan.ranks // plan.tensor_ranks}
    if plan.form == "tensor" and plan.tensor_ranks > 2 and not halves:
        # elsewhere the replicas exchange during the backward pass: nobody would wait for it
        counts["mesh_dp"] = plan.tensor_ranks
    layer = str(draw.choice(list(counts)))
    place = int(draw.integers(counts[layer]))
    fault = Fault(cause="link", size=float(draw.uniform(2, 5)), place=place, layer=layer)
    return replace(plan, fault=fault)
