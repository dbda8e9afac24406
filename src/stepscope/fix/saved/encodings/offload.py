"""Values that wait for backward in pinned host memory, and how long the device waited for
their copies.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepscope.fix.saved.encodings.encoded import Encoded, whole
from stepscope.fix.saved.operators import is_capturing
from stepscope.fix.saved.step_record import OFFLOAD, LinkSpeed, OffloadPoints

# Copies run on streams of their own, one a direction. The plan says at which saved tensor of
# forward a copy is over: there the computing stream waits for it and the device memory goes back,
# in the order of that stream, however far the host has run ahead. It also says at which saved
# tensor of backward a value has to be fetched so that it arrives in time; the stream that reads it
# waits for its event. A copy that nobody waits for any more is left to the allocator.

_TRIAL_BYTES = 1 << 25
_ROUNDS = 3


class PinnedLink(Protocol):
    """Moves flat tensors to host memory and back. Whatever is returned is ready only for whoever
    calls `left` or `arrived`, which make the current stream wait."""

    def send(self, tensor: torch.Tensor) -> Any: ...

    def left(self, sent: Any) -> None: ...

    def fetch(self, sent: Any) -> Any: ...

    def arrived(self, fetched: Any) -> torch.Tensor: ...

    def forgotten(self, sent: Any, fetched: Any, leaving: torch.Tensor | None) -> None:
        """Nobody reads the value, though copies of it may still run."""

    def speed(self) -> LinkSpeed: ...


class OffloadedValue:
    """One value in host memory, until backward has read it."""

    def __init__(
        self, link: PinnedLink, tensor: torch.Tensor, points: OffloadPoints | None
    ) -> None:
        self.points = points
        self._link = link
        self._leaving: torch.Tensor | None = tensor
        self._sent: Any = link.send(tensor)
        self._fetched: Any = None
        self._read: torch.Tensor | None = None

    def __del__(self) -> None:
        if self._read is None:
            self._link.forgotten(self._sent, self._fetched, self._leaving)

    @property
    def was_read(self) -> bool:
        return self._read is not None

    def leave(self) -> None:
        """Give its device memory back, once the copy is over."""
        if self._leaving is not None:
            self._link.left(self._sent)
            self._leaving = None

    def start(self) -> None:
        """Begin to fetch it."""
        self.leave()
        if self._fetched is None and self._read is None:
            self._fetched = self._link.fetch(self._sent)

    def read(self) -> torch.Tensor:
        """All readers of one value get one tensor: it goes with the last node that holds it."""
        with _LOCK:
            if self._read is None:
                self.start()
                self._read = self._link.arrived(self._fetched)
                self._sent = self._fetched = None
            return self._read


_LOCK = threading.RLock()
_OUTSTANDING: list[weakref.ref[OffloadedValue]] = []  # in the order of forward
_LINKS: dict[torch.device, PinnedLink | None] = {}


def packed(number: int) -> None:
    """Forward has saved this tensor: copies that are over by then give their memory back."""
    with _LOCK:
        for value in _outstanding():
            if value.points is not None and value.points.left_at <= number:
                value.leave()


def unpacked(number: int) -> None:
    """Backward reads this saved tensor: what it needs next has to be on its way."""
    with _LOCK:
        for value in reversed(_outstanding()):
            value.leave()  # forward is over
            if value.points is not None and value.points.fetch_at >= number:
                value.start()


def _outstanding() -> list[OffloadedValue]:
    """Values that are not read yet."""
    found = [value for reference in _OUTSTANDING if (value := reference()) is not None]
    waiting = [value for value in found if not value.was_read]
    _OUTSTANDING[:] = map(weakref.ref, waiting)
    return waiting


@dataclass(frozen=True, slots=True)
class FetchPoint:
    """A saved tensor that says how far backward is."""

    number: int
    held: Any

    def unpack(self) -> torch.Tensor:
        unpacked(self.number)
        tensor: torch.Tensor = self.held.unpack()
        return tensor


def encode_offload(tensor: torch.Tensor, points: str = "") -> Encoded | None:
    """`offload`; None where the device has no link, or a CUDA graph is being captured."""
    flat, link = whole(tensor), link_of(tensor.device)
    if flat is None or link is None:
        return None
    value = OffloadedValue(link, flat, OffloadPoints.of(f"{OFFLOAD} {points}"))
    with _LOCK:
        _OUTSTANDING.append(weakref.ref(value))
    return Encoded(0, value.read)


def link_of(device: torch.device) -> PinnedLink | None:
    if is_capturing():
        return None
    if device not in _LINKS:
        _LINKS[device] = CudaPinnedLink(device) if device.type == "cuda" else None
    return _LINKS[device]


@dataclass(frozen=True, slots=True)
class _InHost:
    buffer: torch.Tensor
    complete: Any  # event


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    tensor: torch.Tensor
    complete: Any
    buffer: torch.Tensor


class PinnedBuffers:
    """Host memory of steps before, by size: to ask torch for it anew takes a quarter of a
    millisecond each time, and far longer when there is none."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, Any]]] = {}

    def take(self, like: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A buffer and the event after which it may be written; None: at once."""
        free = self._free.get((like.numel(), like.dtype))
        return free.pop() if free else (self._make(like), None)

    def give_back(self, buffer: torch.Tensor, read: Any) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append((buffer, read))


class CudaPinnedLink:
    """Move tensors between one CUDA device and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._buffers = PinnedBuffers(
            lambda like: torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        )
        self._speed: LinkSpeed | None = None

    def send(self, tensor: torch.Tensor) -> _InHost:
        buffer, free = self._buffers.take(tensor)
        if free is not None:
            self._out.wait_event(free)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            buffer.copy_(tensor, non_blocking=True)
        return _InHost(buffer, self._out.record_event(_timed_event()))

    def left(self, sent: _InHost) -> None:
        self._wait_for(sent.complete)

    def fetch(self, sent: _InHost) -> _OnItsWay:
        tensor = torch.empty_like(sent.buffer, device=self._device, pin_memory=False)
        # The memory may still be read by what the current stream has queued.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(sent.complete)
        with torch.cuda.stream(self._in):
            tensor.copy_(sent.buffer, non_blocking=True)
        return _OnItsWay(tensor, self._in.record_event(_timed_event()), sent.buffer)

    def arrived(self, fetched: _OnItsWay) -> torch.Tensor:
        self._wait_for(fetched.complete)
        self._buffers.give_back(fetched.buffer, fetched.complete)
        return fetched.tensor

    def _wait_for(self, complete: Any) -> None:
        stream = torch.cuda.current_stream(self._device)
        if COPY_WAITS.noting:
            COPY_WAITS.note(stream.record_event(_timed_event()), complete)
        stream.wait_event(complete)

    def forgotten(
        self, sent: _InHost | None, fetched: _OnItsWay | None, leaving: torch.Tensor | None
    ) -> None:
        if leaving is not None and sent is not None and not sent.complete.query():
            leaving.record_stream(self._out)
        if fetched is not None and not fetched.complete.query():
            fetched.tensor.record_stream(self._in)

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


def _timed_event() -> Any:
    make: Callable[..., Any] = torch.cuda.Event
    return make(enable_timing=True)


def _fastest_ns(copy: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(_ROUNDS):
        began, ended = _timed_event(), _timed_event()
        began.record()
        copy()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e6)
    return max(1.0, min(times))


# How long a device waited for copies of offloaded values: noted while plans are tried.

_MOST_WAITS = 4096


class CopyWaits:
    """Each wait is a pair of events with times: just before the computing stream had to wait, and
    at the end of the copy. Where the copy ended first, nobody waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: deque[tuple[Any, Any]] | None = None

    @property
    def noting(self) -> bool:
        return self._waits is not None

    def begin(self) -> None:
        """Anew."""
        with self._lock:
            self._waits = deque(maxlen=_MOST_WAITS)

    def end(self) -> None:
        with self._lock:
            self._waits = None

    def note(self, before: Any, complete: Any) -> None:
        with self._lock:
            if self._waits is not None:
                self._waits.append((before, complete))

    def waited_ns(self) -> int:
        """Since `begin`, as far as it is over; the host does not wait for the rest. 0 while a CUDA
        graph is captured: a question about an event would end the capture."""
        if is_capturing():
            return 0
        with self._lock:
            waits = list(self._waits or ())
        over = [pair for pair in waits if all(event.query() for event in pair)]
        waited_ms = [float(before.elapsed_time(complete)) for before, complete in over]
        return round(sum(max(0.0, one) for one in waited_ms) * 1e6)


COPY_WAITS = CopyWaits()
