"""Values that wait for backward in pinned host memory.

Copies run on streams of their own, one a direction. A value's device memory goes back when its copy
is done (`record_stream`). In backward the next values are fetched while the ones before are used:
the last two that were not read yet are always on their way, and the stream that reads one waits for
its event. A copy that is never read is dropped with its events, and the allocator waits for them.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stepscope.fix.saved.encoding_names import FETCHED_AHEAD
from stepscope.fix.saved.encodings.encoded import Encoded, whole
from stepscope.fix.saved.graph_capture import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable

_TRIAL_BYTES = 1 << 25
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Between a device and host memory, measured; `host_ns` is what a value costs the host."""

    out_bytes_per_ns: float
    in_bytes_per_ns: float
    host_ns: int


class PinnedLink(Protocol):
    """Moves flat tensors to host memory and back. Whatever is returned is ready only for whoever
    calls `arrived`, which makes the current stream wait."""

    def send(self, tensor: torch.Tensor) -> Any: ...

    def fetch(self, sent: Any) -> Any: ...

    def arrived(self, fetched: Any) -> torch.Tensor: ...

    def speed(self) -> LinkSpeed: ...


class OffloadedValue:
    """One value in host memory, until backward has read it."""

    def __init__(self, link: PinnedLink, tensor: torch.Tensor) -> None:
        self._link = link
        self._sent: Any = link.send(tensor)
        self._fetched: Any = None
        self._read: torch.Tensor | None = None

    @property
    def was_read(self) -> bool:
        return self._read is not None

    def start(self) -> None:
        """Begin to fetch it."""
        if self._fetched is None and self._read is None:
            self._fetched = self._link.fetch(self._sent)

    def read(self) -> torch.Tensor:
        """All readers of one value get one tensor: it goes with the last node that holds it."""
        with _LOCK:
            if self._read is None:
                self.start()
                self._read = self._link.arrived(self._fetched)
                self._sent = self._fetched = None
            fetch_ahead()
            return self._read


_LOCK = threading.RLock()
_OUTSTANDING: list[weakref.ref[OffloadedValue]] = []  # in the order of forward
_LINKS: dict[torch.device, PinnedLink | None] = {}


def fetch_ahead() -> None:
    """Backward goes on: see to it that the next values are on their way."""
    if not _OUTSTANDING:
        return
    with _LOCK:
        ahead: list[OffloadedValue] = []
        for reference in reversed(_OUTSTANDING):
            value = reference()
            if value is not None and not value.was_read:
                ahead.append(value)
                if len(ahead) == FETCHED_AHEAD:
                    break
        while _OUTSTANDING and _is_over(_OUTSTANDING[-1]):
            _OUTSTANDING.pop()
        for value in ahead:
            value.start()


def _is_over(reference: weakref.ref[OffloadedValue]) -> bool:
    value = reference()
    return value is None or value.was_read


def encode_offload(tensor: torch.Tensor) -> Encoded | None:
    """`offload`; None where the device has no link, or a CUDA graph is being captured."""
    flat, link = whole(tensor), link_of(tensor.device)
    if flat is None or link is None:
        return None
    value = OffloadedValue(link, flat)
    with _LOCK:
        while _OUTSTANDING and _OUTSTANDING[-1]() is None:
            _OUTSTANDING.pop()  # of passes without a backward
        _OUTSTANDING.append(weakref.ref(value))
    return Encoded(0, value.read)


def link_of(device: torch.device) -> PinnedLink | None:
    if is_capturing():
        return None
    if device not in _LINKS:
        _LINKS[device] = CudaPinnedLink(device) if device.type == "cuda" else None
    return _LINKS[device]


def use_link(device: torch.device, link: PinnedLink | None) -> None:
    """Replace the link of a device."""
    _LINKS[device] = link


@dataclass(frozen=True, slots=True)
class _InHost:
    buffer: torch.Tensor
    complete: Any  # event


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    tensor: torch.Tensor
    complete: Any


class CudaPinnedLink:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._speed: LinkSpeed | None = None

    def send(self, tensor: torch.Tensor) -> _InHost:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            buffer.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)
        return _InHost(buffer, self._out.record_event())

    def fetch(self, sent: _InHost) -> _OnItsWay:
        tensor = torch.empty_like(sent.buffer, device=self._device, pin_memory=False)
        # The memory may still be read by what the current stream has queued.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(sent.complete)
        with torch.cuda.stream(self._in):
            tensor.copy_(sent.buffer, non_blocking=True)
        tensor.record_stream(self._in)
        return _OnItsWay(tensor, self._in.record_event())

    def arrived(self, fetched: _OnItsWay) -> torch.Tensor:
        torch.cuda.current_stream(self._device).wait_event(fetched.complete)
        return fetched.tensor

    def speed(self) -> LinkSpeed:
        """Measured once, with pinned memory."""
        if self._speed is None:
            self._speed = self._measured()
        return self._speed

    def _measured(self) -> LinkSpeed:
        on_device = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=self._device)
        on_host = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
        out_ns = _fastest_ns(lambda: on_host.copy_(on_device, non_blocking=True))
        in_ns = _fastest_ns(lambda: on_device.copy_(on_host, non_blocking=True))
        small = on_device[:1024]
        host_ns = []
        for _ in range(_ROUNDS):
            began = time.perf_counter_ns()
            self.arrived(self.fetch(self.send(small)))
            host_ns.append(time.perf_counter_ns() - began)
        return LinkSpeed(_TRIAL_BYTES / out_ns, _TRIAL_BYTES / in_ns, min(host_ns))


def _fastest_ns(copy: Callable[[], Any]) -> float:
    times: list[float] = []
    make: Callable[..., Any] = torch.cuda.Event
    for _ in range(_ROUNDS):
        began, ended = make(enable_timing=True), make(enable_timing=True)
        began.record()
        copy()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e6)
    return max(1.0, min(times))
