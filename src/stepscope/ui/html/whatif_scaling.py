"""Workers, links and buckets: their controls, and the data from which the page computes steps.

Every number of workers, link and bucket size together with every other change would be too many
steps to predict beforehand. The page gets each step as tables instead (predict/max_plus.py) and
adds the exchange of gradients itself (scaled_step.js), with the same result. Workers that share one
batch have steps of their own, one for each number of samples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import to_builtins

from stepscope.predict import scale_out, whatif
from stepscope.predict.contracted_step import contract_step
from stepscope.predict.outcome import Refused
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.scale_out import describe_batch, share_of_batch
from stepscope.predict.scaling_grid import WORKERS, CannotScale, find_scaling_setup
from stepscope.predict.stalls import grow_stalls, share_stalls
from stepscope.predict.whatif import JOINED
from stepscope.records.figures import size
from stepscope.ui.html.payload import encode_block
from stepscope.ui.html.whatif_axes import Axis, Option
from stepscope.verify.track_record import NARROWEST, learn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.explain.replay.graph import Floats
    from stepscope.predict.contracted_step import ContractedStep
    from stepscope.predict.max_plus import StepTables
    from stepscope.predict.scaling_grid import ScalingSetup, WorkerLink
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.whatif import Bench, Trial
    from stepscope.records.prediction import PeakMemory, Setting
    from stepscope.records.promise import TrackedPromise
    from stepscope.ui.html.payload import Column

BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_NAMES = {0.25: "¼×", 0.5: "½×"}
_PARTS = 1 << 17  # times in the file are rounded to this part of a step
_BASIS = {
    "carried over": "as calibrated for another number of workers",
    "data sheet": "from the device's data sheet; stepscope calibrate measures them",
    "trace": "as seen in this trace",
    "calibrated": "as calibrated",
}


Stalled = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """The step of a worker that has only a share of the batch."""

    step: ContractedStep
    peak: PeakMemory | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCell:
    """One combination of the other controls."""

    step: ContractedStep
    step_ns: float  # before a CUDA graph is made of it
    variance: float
    spread: float  # of the CUDA graph
    shared: tuple[SharedStep | None, ...] = ()  # by link: all workers share one batch
    # By link: ns and doubt of the stalls of an average step, with a batch each and with a shared
    # one; empty if the run's steps are not known.
    stalls: tuple[tuple[Stalled, Stalled], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts:
    """How far predictions are off, as standard deviations of the step's logarithm."""

    change: float  # of any change
    least: float
    model: float  # of the exchange
    straggling: float
    host: float
    share: float  # of a share of the batch
    low_end: float  # low end of the step as it is, over the step
    reached: float  # share of it that no link makes shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What the page computes from; `why` is the reason where workers cannot be predicted."""

    setup: ScalingSetup | None
    why: str
    axes: tuple[Axis, ...]
    doubts: Doubts | None = None
    adjusted: dict[str, tuple[float, float]] | None = None  # by what-ifs' names: shift and stretch
    unit_ns: float = 1.0


def find_scaling(bench: Bench, history: Sequence[TrackedPromise]) -> Scaling:
    """Controls that cannot be moved say why."""
    try:
        setup = find_scaling_setup(bench)
    except CannotScale as reason:
        return Scaling(setup=None, why=str(reason), axes=_axes(None, str(reason)))
    return Scaling(
        setup=setup,
        why="",
        axes=_axes(setup, ""),
        doubts=find_doubts(bench),
        adjusted=_adjusted(history),
        unit_ns=max(1.0, bench.corrected.step_ns / _PARTS),
    )


def find_doubts(bench: Bench) -> Doubts:
    on_host = bench.context.on_host
    return Doubts(
        change=whatif.CHANGE_DOUBT,
        least=whatif.SMALLEST_DOUBT,
        model=scale_out.MODEL_DOUBT[on_host],
        straggling=scale_out.STRAGGLING_DOUBT,
        host=whatif.host_spread(bench.corrected),
        share=scale_out.SHARE_DOUBT[on_host],
        low_end=bench.lowest,
        reached=scale_out.LINK_FLOOR,
    )


class ScalingCells:
    """The steps of all cells. Twice the batch among twice the workers is the same step: each is
    worked out once."""

    def __init__(self, setup: ScalingSetup) -> None:
        self.setup = setup
        self.known: dict[tuple[object, ...], ContractedStep] = {}

    def make_cell(
        self, local: Trial, settings: Sequence[Setting], spread: float, *, graphed: bool
    ) -> ScalingCell:
        """`local` is the trial before a CUDA graph was made of it."""
        others = frozenset(setting for setting in settings if setting.name != "batch")
        return ScalingCell(
            step=self._contract(local.context, 1.0, others, graphed),
            step_ns=local.step_ns,
            variance=local.variance,
            spread=spread,
            shared=tuple(
                self._share(local, link.ranks, others, graphed) for link in self.setup.links
            ),
            stalls=tuple(
                self._stalls(local.context, link.ranks)
                for link in self.setup.links
                if local.context.stalls
            ),
        )

    def _stalls(self, context: StepContext, ranks: int) -> tuple[Stalled, Stalled]:
        before = self.setup.before
        own, part = (
            share_stalls(grow_stalls(context.stalls, share), ranks, before)
            for share in (1.0, before / ranks)
        )
        assert own is not None
        assert part is not None
        return (own.total_ns, own.mean_doubt_ns), (part.total_ns, part.mean_doubt_ns)

    def _share(
        self, local: Trial, ranks: int, others: frozenset[Setting], graphed: bool
    ) -> SharedStep | None:
        context, share = local.context, self.setup.before / ranks
        same = not graphed and local.peak_changes <= {JOINED}
        try:
            return SharedStep(
                step=self._contract(context, share, others, graphed),
                peak=peak_at_batch(context, context.grown * share) if same else None,
            )
        except Refused:
            return None

    def _contract(
        self, context: StepContext, share: float, others: frozenset[Setting], graphed: bool
    ) -> ContractedStep:
        key = (others, graphed, round(context.grown * share, 9))
        if key not in self.known:
            context = share_of_batch(context, self.setup.before, share)
            self.known[key] = contract_step(self.setup, context, graphed=graphed)
        return self.known[key]


def _adjusted(history: Sequence[TrackedPromise]) -> dict[str, tuple[float, float]]:
    """Shift and stretch that earlier predictions of the same changes teach."""
    lessons = {name: learn(name, history) for name in {kept.promise.name for kept in history}}
    return {name: (known.shift, known.stretch) for name, known in lessons.items() if known}


# The controls


def _axes(setup: ScalingSetup | None, why: str) -> tuple[Axis, ...]:
    before = setup.before if setup else 1
    return (
        _workers(before, [link.ranks for link in setup.links] if setup else WORKERS, why),
        _share(setup, why),
        _bandwidth(why),
        _buckets(setup, why),
    )


def _workers(before: int, known: Sequence[int], why: str) -> Axis:
    options = (
        Option(label=f"{many:,} (now)", setting="")
        if many == before
        else Option(label=f"{many:,}", setting=f"workers={many}")
        for many in known
    )
    return _slider("workers", "Workers", "DDP replicas of the model", options, why)


def _slider(id_: str, label: str, hint: str, options: Iterable[Option], why: str) -> Axis:
    return Axis(id=id_, label=label, hint=hint, kind="slider", options=tuple(options), why=why)


def _share(setup: ScalingSetup | None, why: str) -> Axis:
    """A part of the setting of workers: workers=8:strong."""
    own, shared = Option(label="each its own", setting=""), Option(label="shared", setting="strong")
    return Axis(
        id="share",
        label="Their batch",
        hint="Weak scaling, or strong: with more workers fewer samples for each",
        kind="choice",
        options=(own, shared),
        why=why or (setup.no_share if setup else ""),
    )


def _bandwidth(why: str) -> Axis:
    def option(factor: float) -> Option:
        name = _NAMES.get(factor, f"{factor:g}×")
        if factor == 1.0:
            return Option(label=f"{name} (now)", setting="")
        return Option(label=name, setting=f"bandwidth={factor:g}")

    hint = "Bytes a second between workers"
    return _slider("bandwidth", "Link bandwidth", hint, map(option, BANDWIDTHS), why)


def _buckets(setup: ScalingSetup | None, why: str) -> Axis:
    traced = setup is not None and not any(setup.ways[0].host_ns)
    now_mb = 0.0 if traced else 25.0
    layouts = sorted(setup.ways, key=lambda one: one.bucket_mb or now_mb) if setup else []
    options = [
        Option(label=f"{layout.bucket_mb:g} MiB", setting=f"bucket-mb={layout.bucket_mb:g}")
        if layout.bucket_mb
        else Option(label="as traced (now)" if traced else "25 MiB (now)", setting="")
        for layout in layouts
    ]
    if len(options) < 2 and not why and setup:
        why = setup.no_buckets or (
            f"All gradients ({size(sum(setup.ways[0].size_bytes))}) fit into one bucket"
        )
    options = options or [Option(label="25 MiB (now)", setting="")]
    return _slider("bucket-mb", "Bucket size", "DDP's bucket_cap_mb", options, why)


# The data, as scaled_step.js reads it


def encode_scaling(scaling: Scaling, cells: Sequence[ScalingCell | None]) -> str:
    """A data block: numbers by cell in the head, tables as columns."""
    setup = scaling.setup
    assert setup is not None
    assert scaling.doubts is not None
    columns: dict[str, Column] = {}
    known = [cell for cell in cells if cell]
    every = [cell.step for cell in known]
    every += [share.step for cell in known for share in cell.shared if share]
    steps = list({id(step): step for step in every}.values())
    place = {id(step): number for number, step in enumerate(steps)}
    shapes = {
        name: _tables(name, [getattr(step, name) for step in steps], scaling.unit_ns, columns)
        for name in ("planned", "traced")
    }
    head = {
        "unit": scaling.unit_ns,
        "before": setup.before,
        "onHost": setup.on_host,
        "links": [_link_data(link) for link in setup.links],
        "buckets": to_builtins(setup.ways),
        "finish": setup.finish_ns,
        "sent": setup.sent_bytes,
        "send": setup.send_ns,
        "afterSend": setup.sent_ns,
        "moments": setup.moments,
        "forward": setup.forward,
        "doubts": asdict(scaling.doubts),
        "adjusted": scaling.adjusted or {},
        "narrowest": NARROWEST,
        "shapes": shapes,
        "held": setup.held_bytes,
        "batch": [describe_batch(on_host=setup.on_host, strong=strong) for strong in (False, True)],
        "steps": [_step_data(step) for step in steps],
        "cells": [_cell_data(cell, place) if cell else None for cell in cells],
    }
    return encode_block(_rounded(head), columns)


def _link_data(link: WorkerLink) -> dict[str, Any]:
    return {**to_builtins(link), "basis": _BASIS.get(link.basis, link.basis)}


def _cell_data(cell: ScalingCell, place: dict[int, int]) -> dict[str, Any]:
    return {
        "ns": cell.step_ns,
        "variance": cell.variance,
        "spread": cell.spread,
        "step": place[id(cell.step)],
        "shared": [place[id(share.step)] if share else None for share in cell.shared],
        "peaks": [_peak_data(share) for share in cell.shared],
        "stalls": cell.stalls,
    }


def _peak_data(share: SharedStep | None) -> dict[str, int] | None:
    if share is None or share.peak is None:
        return None
    peak = share.peak
    return {"peak": peak.size_bytes, "peak_low": peak.low_bytes, "peak_high": peak.high_bytes}


def _step_data(step: ContractedStep) -> dict[str, Any]:
    return {
        "compute": step.compute,
        "task": step.task_ns,
        "waiting": step.waiting_ns,
        "wait": step.wait_ns,
        "share": step.share,
        "silent": step.silent_ns,
        "quiet": step.quiet_ns,
        **{
            name: {
                "host": shape.host_ns,
                "busy": shape.busy_ns,
                "own": shape.own,
                "marked": shape.marked,
            }
            for name in ("planned", "traced")
            if (shape := getattr(step, name)) is not None
        },
    }


def _tables(
    name: str, shapes: Sequence[StepTables | None], unit_ns: float, columns: dict[str, Column]
) -> dict[str, Any] | None:
    """One column for each pair of times, over steps and stretches; 0 is never, else one more."""
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return None
    times = max(shape.tables.shape[1] for shape in known)
    stretches = max(shape.tables.shape[0] for shape in known)
    sloped = any(shape.slope is not None for shape in known)
    kinds = ("tables", "slope") if sloped else ("tables",)
    for kind in kinds:
        whole = np.full((len(shapes), stretches, times, times), -np.inf)
        for number, shape in enumerate(shapes):
            if shape is not None:
                long, wide, _ = shape.tables.shape
                whole[number, :long, :wide, :wide] = _part(shape, kind)
        finite = np.isfinite(whole)
        ints = np.where(finite, np.rint(np.where(finite, whole, 0.0) / unit_ns) + 1, 0)
        ints = np.maximum(ints, 0).astype(np.int64)
        for to in range(times):
            for start in range(times):
                columns[f"{name}-{kind}-{to}-{start}"] = ints[:, :, to, start].reshape(-1)
    return {"times": times, "stretches": stretches, "sloped": sloped}


def _part(shape: StepTables, kind: str) -> Floats:
    if kind == "tables":
        return shape.tables
    slope = shape.tables * np.array(shape.own) if shape.slope is None else shape.slope
    part: Floats = np.where(np.isfinite(shape.tables), slope, -np.inf)
    return part


def _rounded(value: Any) -> Any:
    """Seven digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value
