"""Time the operators of a compiled step on its own device, or estimate them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepscope.fix.saved.compiled.joint_graph import (
    FIXED,
    KERNEL,
    POINTWISE,
    GraphValue,
    JointGraph,
    length,
    operator_name,
)

_MOST_SECONDS = 0.8  # of measuring, for one graph
# Where nothing was measured: bytes and floating-point operations a nanosecond.
_BANDWIDTH = {"cuda": 2000.0, "cpu": 10.0}
_RATE = {"cuda": 100_000.0, "cpu": 50.0}
_LAUNCH_NS = {"cuda": 2500, "cpu": 2000}
# Arithmetic of a fused value, as a share of the time that writing it would take.
_ARITHMETIC = 0.05
_RANDOM_ARITHMETIC = 1.0


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    bytes_per_ns: float
    launch_ns: int

    def move_ns(self, size_bytes: int) -> int:
        return int(size_bytes / self.bytes_per_ns)


def set_costs(graph: JointGraph, device: torch.device) -> DeviceSpeed:
    """Set what every operator of both graphs takes when it runs alone."""
    kernels = dict[Any, list[GraphValue]]()
    for value in (*graph.forward, *graph.backward):
        if value.kind in (KERNEL, FIXED) and value.node.op == "call_function":
            kernels.setdefault(_signature(value.node), []).append(value)
    kind = device.type if device.type in _RATE else "cuda"
    measured, bandwidth = _measure(
        sorted(kernels, key=lambda key: -_work(kernels[key][0])),
        {key: values[0].node for key, values in kernels.items()},
        device,
    )
    speed = DeviceSpeed(bandwidth or _BANDWIDTH[kind], _LAUNCH_NS[kind])
    rates = sorted(_flops(kernels[key][0].node) / ns for key, ns in measured.items() if ns)
    rate = next((r for r in rates[len(rates) // 2 :] if r > 0), _RATE[kind])
    for key, values in kernels.items():
        cost_ns = measured.get(key)
        if cost_ns is None:
            flops = _flops(values[0].node)
            cost_ns = speed.move_ns(_moved_bytes(values[0])) + int(flops / rate)
        for value in values:
            value.cost_ns = cost_ns
    _set_fused_costs(graph, speed)
    return speed


def _set_fused_costs(graph: JointGraph, speed: DeviceSpeed) -> None:
    """A saved value is written again, and its kernel reads what it is made of.

    Where rounding may differ, pointwise readers compute it themselves.
    """
    read_whole = {
        source for user in graph.backward if user.kind != POINTWISE for source in user.inputs
    }
    reads: dict[GraphValue, frozenset[GraphValue]] = {}  # of the kernel that a value is fused into
    for value in graph.forward:
        if value.kind != POINTWISE:
            reads[value] = frozenset((value,))
            continue
        read = frozenset[GraphValue]().union(*(reads[source] for source in value.inputs))
        moved = 0
        if value.saved:
            if graph.exact or value in read_whole:
                moved = value.size_bytes + sum(source.size_bytes for source in read)
            read = frozenset((value,))
        reads[value] = read
        random = operator_name(value.node) in ("inductor_random", "inductor_randint")
        arithmetic = (_RANDOM_ARITHMETIC if random else _ARITHMETIC) * value.size_bytes
        value.cost_ns = speed.move_ns(int(moved + arithmetic))


def _moved_bytes(value: GraphValue) -> int:
    return value.size_bytes + sum(source.size_bytes for source in value.inputs)


def _work(value: GraphValue) -> float:
    return _flops(value.node) / 50 + _moved_bytes(value)


def _tensors(node: fx.Node) -> Iterator[Any]:
    for source in node.all_input_nodes:
        yield source.meta.get("val")


def _flops(node: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry

    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is None:
        return 0
    arguments = fx.node.map_arg(node.args, lambda source: source.meta.get("val"))
    try:
        return int(count(*arguments, **node.kwargs, out_val=node.meta.get("val")))
    except Exception:  # a formula that does not know these arguments
        return 0


def _signature(node: fx.Node) -> Any:
    """Return what calls that take the same time have in common."""

    def describe(source: fx.Node) -> str:
        tensor = source.meta.get("val")
        if isinstance(tensor, torch.Tensor):
            return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"
        return str(tensor)

    return str(node.target), str(fx.node.map_arg((node.args, node.kwargs), describe))


def _measure(
    keys: list[Any], nodes: dict[Any, fx.Node], device: torch.device
) -> tuple[dict[Any, int], float | None]:
    """Run operators in a thread of its own: the compiler's tracing modes do not reach it."""
    times: dict[Any, int] = {}
    bandwidth: list[float] = []

    def run() -> None:
        end = time.monotonic() + _MOST_SECONDS
        clock = _timer(device)
        with torch.no_grad():
            bandwidth.append(_copy_bandwidth(device, clock))
            for key in keys:
                if time.monotonic() > end:
                    return
                node = nodes[key]
                try:
                    arguments, options = _arguments(node, device)
                    times[key] = clock(lambda: node.target(*arguments, **options))  # noqa: B023
                except Exception:  # out of memory, or arguments that cannot be made up
                    continue

    def run_safely() -> None:
        try:
            run()
        except Exception:
            return

    thread = threading.Thread(target=run_safely, name="stepscope-operator-times", daemon=True)
    thread.start()
    thread.join(10 * _MOST_SECONDS)
    return dict(times), bandwidth[0] if bandwidth else None


def _arguments(node: fx.Node, device: torch.device) -> tuple[Any, Any]:
    """Make up tensors like the node's."""

    def make(source: fx.Node) -> Any:
        like = source.meta["val"]
        if not isinstance(like, torch.Tensor):
            return length(like)
        place = like.device if like.device.type == "cpu" else device
        sizes = [length(extent) for extent in like.shape]
        strides = [length(extent) for extent in like.stride()]
        made = torch.empty_strided(sizes, strides, dtype=like.dtype, device=place)
        return made.uniform_(-1, 1) if like.dtype.is_floating_point else made.zero_()

    return fx.node.map_arg(node.args, make), fx.node.map_arg(dict(node.kwargs), make)


def _timer(device: torch.device) -> Callable[[Callable[[], Any]], int]:
    if device.type == "cuda":
        torch.cuda.set_device(device)

        def on_device(call: Callable[[], Any]) -> int:
            call()
            call()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                call()
            end.record()
            end.synchronize()
            return int(begin.elapsed_time(end) * 1e6 / 3)

        return on_device

    def on_host(call: Callable[[], Any]) -> int:
        call()
        begin = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - begin

    return on_host


def _copy_bandwidth(device: torch.device, clock: Callable[[Callable[[], Any]], int]) -> float:
    size_bytes = 1 << (28 if device.type == "cuda" else 24)
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / max(1, clock(lambda: target.copy_(source)))
