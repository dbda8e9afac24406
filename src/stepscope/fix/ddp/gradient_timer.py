"""When each gradient of a step is ready, and when each bucket was exchanged.

All ranks meet before the step, so that their times count from the same moment. A gradient is ready
when the slowest rank has it, and a bucket is done when the slowest rank has its sum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.fix.ddp.exchange_timeline import BucketTimes, ExchangeTimeline
from stepscope.fix.ddp.reducer import own_hook
from stepscope.fix.ddp.round_robin import round_robin_hook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.ddp.ranks_agree import RanksAgree
    from stepscope.fix.ddp.reducer import Hook

_NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step: when each parameter's gradient is ready, and the exchange."""

    ready_ns: tuple[int, ...]
    timeline: ExchangeTimeline


class GradientTimer:
    """Times the steps between `begin` and `end`, on a DDP whose hook is `hook`."""

    def __init__(self, ddp: Any, parameters: Sequence[Any], agree: RanksAgree) -> None:
        self._parameters, self._agree = parameters, agree
        self._device, self._on_cuda = parameters[0].device, parameters[0].is_cuda
        plain: tuple[Any, Hook] = (None, round_robin_hook([ddp.process_group]))
        self._state, self._exchange = own_hook(ddp) or plain
        self._handles: list[Any] = []
        self._origin: Any = None
        self._ready: dict[int, Any] = {}
        self._buckets: list[tuple[int, Any, list[Any]]] = []  # bytes, ready, and the end

    @property
    def hook(self) -> tuple[Any, Hook]:
        """Exchanges buckets as the DDP does, and notes when."""

        def exchange_timed(state: Any, bucket: Any) -> Any:
            if bucket.index() == 0:
                self._buckets = []  # an earlier pass of the same step
            ended: list[Any] = []
            self._buckets.append((bucket.buffer().nbytes, self._mark(), ended))

            def end(done: Any) -> Any:
                ended.append(self._mark())
                return done.value()

            return self._exchange(state, bucket).then(end)

        return self._state, exchange_timed

    def begin(self) -> None:
        self._agree.meet()
        self._ready, self._buckets = {}, []
        for place, parameter in enumerate(self._parameters):
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda _parameter, place=place: self._ready.update({place: self._mark()})
                )
            )
        self._origin = self._mark()

    def end(self) -> TimedStep:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        wait_for_device(self._parameters[0])
        own = [self._ns(self._ready.get(place)) for place in range(len(self._parameters))]
        ready = self._agree.largest(own)
        times = [(self._ns(ready), self._ns(end[0])) for _, ready, end in self._buckets]
        flat = self._agree.largest([ns for pair in times for ns in pair])
        last = max(*ready, 0.0)
        # A parameter that no rank has used goes with the last ones.
        ready = [last if ns == _NEVER else ns for ns in ready]
        buckets = tuple(
            BucketTimes(size_bytes=size, ready_ns=round(start), end_ns=round(end))
            for (size, _, _), start, end in zip(self._buckets, flat[::2], flat[1::2], strict=True)
        )
        return TimedStep(
            ready_ns=tuple(round(ns) for ns in ready),
            timeline=ExchangeTimeline(buckets=buckets, backward_end_ns=round(last)),
        )

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter_ns()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _ns(self, mark: Any) -> float:
        if mark is None:
            return _NEVER
        if self._on_cuda:
            return float(self._origin.elapsed_time(mark) * 1e6)
        return float(mark - self._origin)


def wait_for_device(parameter: Any) -> None:
    """Until the work that was queued for a parameter's device is done."""
    if parameter.is_cuda:
        import torch

        torch.cuda.synchronize(parameter.device)
