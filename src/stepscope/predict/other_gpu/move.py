"""A step's context on another GPU: device times moved, the host's timeline as recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.other_gpu.gpu import find_row, make_gpu, with_profile
from stepscope.predict.other_gpu.step import move_step
from stepscope.predict.outcome import Refused, changed
from stepscope.predict.probed_step import find_probed_elsewhere
from stepscope.records.efficiency import Ceilings
from stepscope.records.figures import milliseconds, percent

if TYPE_CHECKING:
    from stepscope.predict.other_gpu.gpu import Gpu
    from stepscope.predict.other_gpu.step import MovedStep
    from stepscope.predict.probed_step import ProbedStep
    from stepscope.predict.step_context import StepContext
    from stepscope.records.efficiency import PeakSource

_HOST_DECIDES = 0.92  # of the step: a host busy this long decides it


class MovedContext(msgspec.Struct, frozen=True, kw_only=True):
    context: StepContext
    source: Gpu
    target: Gpu
    assumptions: tuple[str, ...]
    doubt: float
    modelled_share: float  # of the device time: kernels that go by bandwidth alone
    decides: str  # device or host


def source_gpu(context: StepContext) -> Gpu:
    """The GPU of the trace, with what `calibrate` measured on it if that is known."""
    name = context.trace.device_name
    if context.on_host or name is None:
        raise Refused(
            "gpu: the trace has no GPU, and a step on a CPU says nothing about one on a GPU"
        )
    row = find_row(name)
    if row is None:
        raise Refused(f"gpu: {name}, the GPU of the trace, is not in the table of GPUs")
    gpu = make_gpu(row)
    profile = next((one for one in context.profiles if find_row(one.device) == row), None)
    return with_profile(gpu, profile) if profile else gpu


def move_context(context: StepContext, target: Gpu) -> MovedContext:
    """Raises Refused if the trace's GPU is not known or the target lacks the step's units."""
    source = source_gpu(context)
    if target.row == source.row and not target.calibrated:
        target = source
    probed, problem = None, ""
    if source != target:
        probed, problem = find_probed_elsewhere(context, lambda name: find_row(name) == target.row)
    moved = move_step(context, source, target, probed)
    if moved.missing:
        raise Refused(
            f"gpu: {target.name} has no {', '.join(moved.missing)} units, which this step uses"
        )
    tasks = replace(context.graph.tasks, dur_ns=moved.dur_ns, spacing_ns=moved.spacing_ns)
    graph = replace(context.graph, tasks=tasks)
    after = replace(
        changed(context, graph),
        ceilings=_ceilings(target),
        multiprocessors=target.multiprocessors,
        is_as_traced=False,
    )
    step = step_ns(graph)
    decides = "host" if graph.host_ns >= _HOST_DECIDES * step > graph.device_ns else "device"
    return MovedContext(
        context=after,
        source=source,
        target=target,
        assumptions=(
            *_assumptions(source, target, moved, after, decides, probed),
            *((problem,) if problem else ()),
        ),
        doubt=moved.doubt,
        modelled_share=moved.unknown_share,
        decides=decides,
    )


def _ceilings(gpu: Gpu) -> Ceilings:
    """Data-sheet peaks, or what `calibrate` measured: later what-ifs price by them."""
    flops = {dtype: 1e12 * rate for dtype, rate in gpu.row.tflops.items()}
    sources: dict[str, PeakSource] = dict.fromkeys(flops, "table")
    bytes_s, bytes_source = 1e9 * gpu.row.bandwidth_gb_s, "table"
    if gpu.profile is not None:
        flops |= gpu.profile.matmul_flops
        sources |= dict.fromkeys(gpu.profile.matmul_flops, "calibrated")
        if gpu.profile.copy_bytes_s:
            bytes_s, bytes_source = gpu.profile.copy_bytes_s, "calibrated"
    return Ceilings(
        device=gpu.name,
        flops=flops,
        bytes_s=bytes_s,
        flops_source=sources,
        bytes_source="calibrated" if bytes_source == "calibrated" else "table",
        source="the table of GPUs",
    )


def _assumptions(
    source: Gpu,
    target: Gpu,
    moved: MovedStep,
    after: StepContext,
    decides: str,
    probed: ProbedStep | None,
) -> tuple[str, ...]:
    if source == target:
        return (f"the trace was recorded on a {source.name}, so nothing changes",)
    graph = after.graph
    basis = "calibrated there" if target.calibrated else "not measured there"
    if probed is not None:
        basis = "probed there"
    lines = [
        f"{source.name} -> {target.name}, {basis}: kernels by their shapes, FLOPs and bytes",
        f"CPU time stays as recorded: {milliseconds(graph.host_ns / 1e6)} per step",
    ]
    if probed is not None:
        lines.append(probed.describe("modelled"))
    if moved.unknown_share >= 0.01:
        share = percent(moved.unknown_share)
        lines.append(
            f"{share} of the GPU's time has no FLOPs or bytes, so it is predicted from bandwidth "
            "alone"
        )
    if decides == "host":
        device = milliseconds(graph.device_ns / 1e6)
        lines.append(
            f"host-bound there: the GPU has {device} of work and waits the rest of the step"
        )
    return tuple(lines)
