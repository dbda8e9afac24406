"""precision=tf32|bf16|fp16|fp8: matrix products in another dtype.

tf32 changes the products alone. bf16 and fp16 are autocast's: products, attention and most
elementwise work in half the bytes, norms and losses in fp32, and casts added: every weight once a
step and back again as a gradient, and what norms give to products. Casts cost the host time, so a
step that waits for its host comes out slower.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.edit import insert
from stepscope.predict.kernels import FLOOR_NS, Family, copy_ns, roofline_ns
from stepscope.predict.whatifs.outcome import Outcome, Refused, WrongValue, changed

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats, StepGraph
    from stepscope.predict.scene import Scene
    from stepscope.records.efficiency import Ceilings

HELP = "matrix products in tf32, bf16, fp16 (autocast) or fp8"
VALUES = ("tf32", "bf16", "fp16", "fp8")
_WIDER = {"tf32": ("fp32",), "bf16": ("fp32", "tf32"), "fp16": ("fp32", "tf32")}
_WIDER["fp8"] = ("fp32", "tf32", "bf16", "fp16")
_STAYS_FP32 = re.compile(
    r"norm|softmax|loss|entropy|exp|log|pow|sum|cumsum|embedding|foreach|index|topk|sort", re.I
)
_NORM = re.compile(r"^aten::(?:native_)?(?:layer|group|rms)_norm$|^aten::_?fused_rms_norm$")
_LOSS = re.compile(r"^aten::_?log_softmax$|^aten::cross_entropy|^aten::nll_loss_forward$")
# A cast is four operators and one launch: so much of the step's mean host time for a launch.
_CAST_HOST = 0.42
# cuDNN turns layouts around for narrow convolutions: what that costs the host for each of them.
_CONVOLUTION_HOST = 2.8
_THIN = 8.0  # FLOPs a byte
_MIXED = 0.75  # fp32 and half-width inputs together


def apply(scene: Scene, value: str) -> Outcome:
    """Refuses where nothing runs in a wider dtype, or the device lacks the asked one."""
    if value not in VALUES:
        raise WrongValue(f"precision={value}: choose one of {', '.join(VALUES)}")
    if scene.on_host:
        raise Refused(f"precision={value}: the trace has no accelerator; a CPU's gain is not known")
    ceilings = scene.ceilings
    if ceilings is None or value not in ceilings.flops:
        device = ceilings.device if ceilings else scene.trace.device_name or "this device"
        raise Refused(f"precision={value}: no {value} rate is known for {device}")
    wide = np.array([dtype in _WIDER[value] for dtype in scene.operators.dtype], np.bool_)
    product = wide & (scene.operators.flops > 0)
    # Convolutions that move more than they multiply (depthwise) have no kernels for narrow dtypes.
    thin = (scene.operators.family == Family.CONVOLUTION) & (
        scene.operators.flops < _THIN * np.maximum(scene.operators.bytes_moved, 1.0)
    )
    product &= ~thin
    if value == "tf32":
        product &= scene.operators.family != Family.ATTENTION
    if not product.any():
        raise Refused(f"precision={value}: no matrix product runs in a wider dtype than {value}")
    graph = _faster_products(scene, product, value, ceilings)
    said = [
        f"matrix products at the share of {value}'s peak that such products reached on an H200",
    ]
    if value != "tf32":
        narrow = wide & ~product & ~thin & _halved(scene)
        graph = _narrower(scene, graph, narrow)
        graph, casts = _with_casts(scene, graph, ceilings)
        graph = _slower_convolutions(scene, graph, product)
        said.append(
            f"autocast: elementwise work in half the bytes, norms and losses in fp32, {casts} "
            "casts added with their launches"
        )
    return Outcome(scene=changed(scene, graph), assumptions=tuple(said), spread=0.12)


def _faster_products(scene: Scene, product: Flags, dtype: str, ceilings: Ceilings) -> StepGraph:
    """Each operator's kernels take what the roofline of the new dtype says, together."""
    tasks, of = scene.graph.tasks, scene.operators
    new = tasks.dur_ns.copy()
    half = 0.5 if dtype != "tf32" else 1.0
    backward = scene.task_phase == Phase.BACKWARD
    for family in (Family.MATMUL, Family.ATTENTION, Family.CONVOLUTION, Family.RECURRENT):
        for way in (False, True):
            mine = product & (of.family == family) & (backward == way)
            if mine.any():
                whole = roofline_ns(
                    family,
                    of.flops[mine],
                    np.where(of.bytes_moved[mine] > 0, of.bytes_moved[mine] * half, 0.0),
                    dtype,
                    ceilings,
                    backward=way,
                )
                new[mine] = np.minimum(whole * of.share[mine], tasks.dur_ns[mine] * 1.5)
    return replace(scene.graph, tasks=replace(tasks, dur_ns=new))


def _halved(scene: Scene) -> Flags:
    """Tasks that autocast runs in the narrow dtype, because what feeds them is."""
    phase = scene.task_phase
    names = scene.names()
    stays = np.array([bool(_STAYS_FP32.search(name)) for name in names], np.bool_)
    found: Flags = ~stays & ((phase == Phase.FORWARD) | (phase == Phase.BACKWARD))
    return found


def _narrower(scene: Scene, graph: StepGraph, narrow: Flags) -> StepGraph:
    names = scene.names()
    added = np.array(["add" in name for name in names], np.bool_)
    factor: Floats = np.where(added, _MIXED, 0.5)
    dur = graph.tasks.dur_ns
    shorter = np.minimum(dur, FLOOR_NS) + np.maximum(dur - FLOOR_NS, 0.0) * factor
    return replace(graph, tasks=replace(graph.tasks, dur_ns=np.where(narrow, shorter, dur)))


def _slower_convolutions(scene: Scene, graph: StepGraph, product: Flags) -> StepGraph:
    of = scene.operators
    mine = product & (of.family == Family.CONVOLUTION) & (scene.task_phase == Phase.FORWARD)
    if not mine.any():
        return graph
    launching = int((scene.graph.calls.kind == CallKind.LAUNCH).sum())
    each = _CONVOLUTION_HOST * scene.graph.host_ns / max(1, launching)
    _, first = np.unique(of.row[mine], return_index=True)
    rows = scene.graph.calls.row[scene.graph.tasks.call[mine][first]]
    gaps = graph.calls.gap_ns + each * np.isin(graph.calls.row, rows[rows >= 0])
    return replace(graph, calls=replace(graph.calls, gap_ns=gaps))


def _with_casts(scene: Scene, graph: StepGraph, ceilings: Ceilings) -> tuple[StepGraph, int]:
    """Launches before the products they feed; in backward the gradients' way back."""
    elements = _cast_elements(scene)
    if not len(elements):
        return graph, 0
    calls = graph.calls
    launching = np.flatnonzero(calls.kind == CallKind.LAUNCH)
    per_launch = graph.host_ns / max(1, len(launching))
    every: list[int] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        mine = launching[calls.phase[launching] == phase]
        if not len(mine):
            mine = launching
        # Casts come all along the pass.
        every += mine[np.linspace(0, len(mine) - 1, len(elements)).astype(int)].tolist()
    host = _CAST_HOST * per_launch
    both = np.concatenate((elements, elements))
    return insert(
        graph,
        np.array(every, np.int32),
        gap_ns=host * 0.85,
        call_ns=host * 0.15,
        dur_ns=copy_ns(both * 6.0, ceilings),
        stream=int(graph.tasks.stream[0]) if len(graph.tasks) else 0,
    ), len(both)


def _cast_elements(scene: Scene) -> Floats:
    """Of every tensor that autocast would cast on the way forward: weights and biases of products,
    what norms give to products, and what a loss takes."""
    host, strings = scene.trace.host, scene.trace.strings
    out: list[float] = []
    seen: set[int] = set()
    for row, family, phase in zip(
        scene.operators.row.tolist(),
        scene.operators.family.tolist(),
        scene.task_phase.tolist(),
        strict=True,
    ):
        if row < 0 or row in seen or phase != Phase.FORWARD:
            continue
        seen.add(row)
        name = strings[host.name[row]]
        shapes = _shapes(strings[host.shapes[row]]) if host.shapes[row] >= 0 else []
        if family in (Family.MATMUL, Family.CONVOLUTION):
            out += _weights(scene, shapes)
        elif (_NORM.search(name) or _LOSS.search(name)) and shapes:
            out.append(math.prod(shapes[0]))
    return np.array(out, np.float64)


def _weights(scene: Scene, shapes: list[tuple[int, ...]]) -> list[float]:
    """The inputs that are parameters: also transposed, as linear layers give them."""
    known = set(scene.parameters.shapes) if scene.parameters else set()
    found = [s for s in shapes if s and (s in known or s[::-1] in known)]
    return [float(math.prod(shape)) for shape in found]


def _shapes(text: str) -> list[tuple[int, ...]]:
    try:
        told = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    return [
        tuple(each)
        for each in told
        if isinstance(each, list) and all(isinstance(size, int) for size in each)
    ]
