"""Which operator launched each kernel of a training step, and how long its kernels took.

The profiler links a kernel to the operator that launched it. A captured graph launches without
operators, so its kernels are named after those of the same step that runs as it is.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_NODE = "autograd::engine::evaluate_function: "
_NOISE = re.compile(
    r"^void |at::native::|\(anonymous namespace\)::|c10::|cutlass__5x_cudnn::|cudnn::"
)
_WIDE = 60
UNKNOWN = "no operator"


@dataclass(frozen=True)
class KernelRow:
    """All launches of one kernel by one operator; on a CPU the operator's own time."""

    kernel: str
    launched_by: str
    launches: int
    us: float


def profile_calls(train: Callable[[], Any], on_device: bool) -> list[Any]:
    """The profiler's events of one call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_device else []
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        train()
        if on_device:
            torch.cuda.synchronize()
    return list(profile.events())


def kernel_rows(events: Sequence[Any], names: dict[str, str] | None = None) -> list[KernelRow]:
    """Longest first. `names` says who launches kernels that no operator did."""
    on_device = [one for one in events if _is_kernel(one)]
    if not on_device:
        return _sorted((one.name, _launcher(one), one.self_cpu_time_total) for one in events)
    linked = [
        (kernel.name, _launcher(event), kernel.duration)
        for event in events
        if not _is_on_device(event)
        for kernel in event.kernels
    ]
    missing = Counter(one.name for one in on_device)
    missing.subtract(name for name, _, _ in linked)
    rest = []
    for one in on_device:
        if missing[one.name] > 0:
            missing[one.name] -= 1
            launcher = (names or {}).get(one.name, UNKNOWN)
            rest.append((one.name, launcher, one.time_range.elapsed_us()))
    return _sorted([*linked, *rest])


def launchers(rows: Iterable[KernelRow]) -> dict[str, str]:
    """Kernel -> what launches it, that which takes longest first."""
    by_kernel: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.launched_by != UNKNOWN:
            by_kernel[row.kernel].append(row.launched_by)
    return {kernel: _several(names) for kernel, names in by_kernel.items()}


def table(rows: Sequence[KernelRow], most: int) -> str:
    total = sum(row.us for row in rows)
    lines = [f"{'ms':>8} {'share':>6} {'calls':>6} {'us each':>8}  launched by / kernel"]
    for row in rows[:most]:
        share, each = row.us / max(total, 1e-9), row.us / row.launches
        numbers = f"{row.us / 1e3:8.3f} {share:6.1%} {row.launches:6d} {each:8.1f}"
        lines.append(f"{numbers}  {row.launched_by}")
        lines.append(f"{'':32}{_short(row.kernel)}")
    return "\n".join([*lines, f"{total / 1e3:8.3f} in all"])


def _sorted(found: Iterable[tuple[str, str, float]]) -> list[KernelRow]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel, launched_by, us in found:
        times[kernel, launched_by].append(us)
    rows = [KernelRow(*key, len(every), sum(every)) for key, every in times.items()]
    return sorted(rows, key=lambda row: -row.us)


def _is_on_device(event: Any) -> bool:
    return bool(event.device_type != torch.autograd.DeviceType.CPU)


def _is_kernel(event: Any) -> bool:
    """A range of the user's own is drawn on the device too, over its kernels."""
    return _is_on_device(event) and not getattr(event, "is_user_annotation", False)


def _launcher(event: Any) -> str:
    """The node of autograd or the outermost operator, the innermost one, and its shapes."""
    parents = []
    parent = event
    while parent is not None:
        parents.append(parent.name)
        parent = parent.cpu_parent
    nodes = [name.removeprefix(_NODE) for name in parents if name.startswith(_NODE)]
    outer = nodes[0] if nodes else parents[-1]
    inner = event.name.removeprefix(_NODE)
    shapes = [one for one in event.input_shapes or [] if one][:2]
    where = outer if inner == outer else f"{outer} > {inner}"
    return " ".join([where, *(str(list(one)).replace(" ", "") for one in shapes)])


def _several(names: list[str]) -> str:
    shown = "; ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}; {len(names) - 3} more"


def _short(kernel: str) -> str:
    plain = _NOISE.sub("", kernel)
    return plain if len(plain) <= 2 * _WIDE else f"{plain[:_WIDE]} .. {plain[-_WIDE:]}"
