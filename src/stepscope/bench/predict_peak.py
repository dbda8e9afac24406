"""Predict the peak memory of workloads before they run: two steps with shapes alone, or for real
with small batches where shapes are not enough; and say how much memory is free.

    python -m stepscope.bench.predict_peak < requests (JSON, one PeakRequest a line)

A program of its own, because it may hold a GPU and must give it back.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from stepscope.bench.catalogue import load
from stepscope.bench.fake_training import train_fake, train_for_real
from stepscope.bench.results import LIMIT_S, Method, PeakRequest, PredictedPeak
from stepscope.bench.workload import Config, TrainingWorkload
from stepscope.errors import UnreadableInputError
from stepscope.text.figures import long_duration
from stepscope.trace.files import read_start

# How much memory a training can still get on a device.

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
_MOST_BYTES = 1 << 20


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the GPU, or of this host and container; None where unknown."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # our own reserve would not be there for the training
        return int(torch.cuda.mem_get_info(device)[0])
    known = [_container_bytes()]
    with suppress(UnreadableInputError, KeyError):
        known.append(_fields(_MEMINFO, ":")["MemAvailable"] << 10)
    return min((size for size in known if size is not None), default=None)


def _container_bytes(folder: Path = _CONTAINER) -> int | None:
    """Count the files that it has in memory as free: they make room when it is needed."""
    try:
        limit, used = (
            int(read_start(folder / f"memory.{name}", _MOST_BYTES)) for name in ("max", "current")
        )
        files = _fields(folder / "memory.stat", " ").get("inactive_file", 0)
    except (UnreadableInputError, ValueError):  # no limit
        return None
    return max(0, limit - used + files)


def _fields(path: Path, between: str) -> dict[str, int]:
    """Read `name<between>number` lines; other lines are left out."""
    fields = {}
    for line in read_start(path, _MOST_BYTES).decode(errors="replace").splitlines():
        name, _, value = line.partition(between)
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[name] = int(number[0])
    return fields


# A workload that reads values from its tensors cannot be run with shapes alone: two steps are
# trained for real, with smaller batches if there is little room.

_FEWEST = 2  # samples: norms over a batch refuse one
_EASY = 0.5  # of free memory: what needs no more is tried
_TRIES = 6  # batches looked at to find one that fits


def main() -> None:
    """Answer each request, in their order."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=PeakRequest)
        with redirect_stdout(sys.stderr):  # what a workload prints is no answer
            answer = predict(request, device)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def predict(request: PeakRequest, device: torch.device) -> PredictedPeak:
    """Return no peak for a workload that cannot be run; the notes say why."""
    workload = load(request.name)
    config = workload.config(request.size, request.changes)  # type: ignore[arg-type]
    batch = int(config.batch)
    peaks = _Peaks(workload, config, device, request.ranks)
    known: dict[str, Any] = {
        "device": device.type,
        "free_bytes": free_bytes(device),
        "batch": batch,
        "ranks": request.ranks,
    }
    answer = PredictedPeak(**known)
    try:
        with _time_limit(LIMIT_S):
            answer = replace(peaks.at(batch), **known)
            if answer.fits is False:
                answer = replace(answer, fitting_batch=_largest_fitting(peaks, answer, batch))
    except (Exception, _TimeIsUp) as error:
        return replace(answer, notes=(*answer.notes, _describe(error)))
    return answer


class _TimeIsUp(BaseException):
    """Not an Exception: nobody who tries another way may catch it."""


@dataclass(slots=True)
class _Peaks:
    """Peaks of one workload at several batches."""

    workload: TrainingWorkload
    config: Config
    device: torch.device
    ranks: int
    _unfit_for_fakes: str | None = field(default=None)

    def at(self, batch: int) -> PredictedPeak:
        if self._unfit_for_fakes is None:
            try:
                memory = train_fake(self.workload, self._config(batch), self.device)
            except Exception as error:
                self._unfit_for_fakes = f"shapes are not enough: {_describe(error)}"
            else:
                peak = memory.peak_bytes + self._buckets(memory.gradient_bytes)
                return PredictedPeak(peak_bytes=peak, notes=memory.notes)
            finally:
                gc.collect()
        peak, method = self._trained(batch)
        return PredictedPeak(peak_bytes=peak, method=method, notes=(self._unfit_for_fakes,))

    def _trained(self, batch: int) -> tuple[int, Method]:
        """Twice the batch takes at most twice the memory, so half of it tells whether it can be
        tried."""
        half = max(_FEWEST, batch // 2)
        at_half = self._train(half)
        free = free_bytes(self.device)
        if half >= batch:
            return at_half, "trained"
        if free is not None and batch / half * at_half <= _EASY * free:
            return self._train(batch), "trained"
        quarter = max(1, half // 2)
        per_sample = (at_half - self._train(quarter)) / max(1, half - quarter)
        return at_half + round((batch - half) * per_sample), "smaller batches"

    def _train(self, batch: int) -> int:
        memory = train_for_real(self.workload, self._config(batch), self.device)
        gc.collect()
        return memory.peak_bytes + self._buckets(memory.gradient_bytes)

    def _buckets(self, gradient_bytes: int) -> int:
        """DistributedDataParallel keeps a copy of all gradients to exchange."""
        return gradient_bytes if self.ranks > 1 else 0

    def _config(self, batch: int) -> Config:
        return Config({**self.config, "batch": batch})


def _largest_fitting(peaks: _Peaks, too_large: PredictedPeak, batch: int) -> int | None:
    """Follow the straight line between batches until one fits; None if not even one sample does."""
    room = too_large.room_bytes or 0
    tried = [(batch, too_large.peak_bytes or 0)]
    while batch > 1 and len(tried) <= _TRIES:
        following = batch // 2
        if len(tried) > 1:
            (batch, peak), (other, other_peak) = tried[-1], tried[-2]
            per_sample = (other_peak - peak) / (other - batch)
            if per_sample > 0:
                following = batch + int((room - peak) / per_sample)
        batch = min(batch - 1, max(1, following))
        peak_bytes = peaks.at(batch).peak_bytes
        if replace(too_large, peak_bytes=peak_bytes).fits:
            return batch
        tried.append((batch, peak_bytes or 0))
    return None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise when they are over."""

    def give_up(*_: Any) -> None:
        raise _TimeIsUp(f"no prediction within {long_duration(seconds * 1e9)}")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _describe(error: BaseException) -> str:
    if isinstance(error, _TimeIsUp):
        return str(error)
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
