"""Turn notes into lines of steps.jsonl: wall, device and phase times, with what the
operating system and the allocator say at a step's end.
"""

from __future__ import annotations

import os
import resource
import sys
import weakref
from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import sub
from time import monotonic, perf_counter_ns, sleep
from typing import Any

from stepscope.measure.cuda_graphs import gate
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.steps.phases import (
    COUNTS,
    PHASES,
    RARE_PHASES,
    UNNOTED,
    Ended,
    Note,
    StepClock,
    Stretch,
)
from stepscope.measure.writer import power_of_ten

_TEXT = (
    '"step": %d, "wall_ns": %d, '
    + "".join(f'"{phase}_ns": %d, ' for phase in PHASES)
    + '"end_unix_ns": %d, "window": %s'
)
# Written only when they are not zero, to keep lines short.
_RARE = tuple((phase, f', "{phase}_ns": %d') for phase in (*RARE_PHASES, UNNOTED, "epoch_gap"))
_RARE += tuple((name, f', "{name}": %d') for name in COUNTS if name != "epoch_gap")
# How long the end waits for a device that is still busy with the last steps.
_LAST_WAIT_S, _LOOK_S = 2.0, 0.001


class StepLines:
    """In the writer's thread: notes become lines of steps.jsonl."""

    def __init__(self, began_ns: int) -> None:
        self._clock = StepClock(began_ns)
        self._readings = Readings()
        self._waiting: deque[tuple[str, Any]] = deque()  # for the device
        self._read: list[Any] = []  # events to let go of when no graph is captured

    def __call__(self, rows: Iterable[Note], *, last: bool = False) -> list[str]:
        """Lines that are complete, in the order of their steps; `last`: nothing will follow."""
        for ended in self._clock.read(rows):
            if isinstance(ended, Stretch):
                changes = self._readings.changes(ended.reading)
                self._waiting.append((_stretch_text(ended, changes), ended.events))
                continue
            step, wall_ns, spent = ended
            changes = self._readings.changes(step[6])
            self._waiting.append((_text(step, wall_ns, spent, changes), step[3]))
        # A host that ran ahead ends steps before the device: the last ones are waited for, since
        # their wall times are the host's pace and no step's time.
        lines = []
        until = monotonic() + _LAST_WAIT_S
        while self._waiting:
            text, events = self._waiting[0]
            device = self._device(events) if events is not None else ""
            if device is None and not last:
                break
            if device is None and monotonic() < until:
                sleep(_LOOK_S)
                continue
            self._waiting.popleft()
            lines.append(f"{{{text}{device or ''}}}")
        return lines

    @property
    def trained(self) -> set[int]:
        """Loaders whose batches were trained on, by the ids that their fetches note."""
        return self._clock.trained

    @property
    def phase(self) -> str:
        """What runs now, as far as notes were read; rare phases count wherever they run."""
        return self._clock.phase

    def after_last_step(self) -> dict[str, int]:
        """Time since the last step ended, by phase."""
        spent = self._clock.unfinished
        phases = (*PHASES, *RARE_PHASES, UNNOTED)
        return {f"{phase}_ns": spent[phase] for phase in phases if spent[phase]}

    def _device(self, events: Any) -> str | None:
        """None while the device is busy with the step, or a graph is captured."""
        with gate.kept_open() as is_open:
            if not is_open:
                return None
            self._read.clear()
            device = _device(events)
        if device is not None:
            self._read.append(events)
        return device


def _text(step: Ended, wall_ns: int, spent: dict[str, int], changes: dict[str, int]) -> str:
    """A JSON object without its braces: formatting costs a third of what json.dumps does."""
    number, unix_ns, window, _, marks, _, _ = step
    profiled = "true" if window else "false"
    parts = [_TEXT % (number, wall_ns, *map(spent.__getitem__, PHASES), unix_ns, profiled)]
    parts += [text % spent[name] for name, text in _RARE if spent[name]]
    parts += [f', "{name}": {value}' for name, value in changes.items()]
    parts += [f', "{mark}": true' for mark in marks]
    return "".join(parts)


_WALLS = (("H", 1 << 16), ("I", 1 << 32), ("q", 1 << 63))
_DIGITS = 1000  # of a wall time that are kept


def _stretch_text(stretch: Stretch, changes: dict[str, int]) -> str:
    """Wall times as multiples of a power of ten. The ends are rounded, so that sums stay true."""
    walls = stretch.ends
    unit = power_of_ten(min(walls) // _DIGITS)
    ends = [end // unit for end in accumulate(walls)]
    rounded = list(map(sub, ends, [0, *ends]))
    kind = next(kind for kind, above in _WALLS if max(rounded) < above)
    packed = b64encode(array(kind, rounded)).decode()
    text = (
        f'"step": {stretch.first}, "steps": {len(walls)}, "wall_ns": {sum(walls)}, '
        f'"end_unix_ns": {stretch.unix_ns}, "unit": {unit}, "walls": "{kind}{packed}"'
    )
    return text + "".join(f', "{name}": {value}' for name, value in changes.items())


def steps_of_stretch(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Each step of such a line."""
    walls = array(line["walls"][0])
    walls.frombytes(b64decode(line["walls"][1:]))
    each = (wall * line["unit"] for wall in walls)
    return [
        {"step": line["step"] + place, "wall_ns": wall, f"{UNNOTED}_ns": wall}
        for place, wall in enumerate(each)
    ]


def step_marks(*, skipped: bool, first: bool, last: bool, own: str | None) -> tuple[str, ...]:
    """What is unusual about a step: its beginning (`first`) or end (`last`) was not seen, or its
    times include our `own` work (session/special_steps.py)."""
    if not (skipped or first or last or own):
        return ()
    marks = {"skipped": skipped, "first": first, "last": last}
    names = tuple(mark for mark, holds in marks.items() if holds)
    return names if own is None else (*names, own)


def _device(events: Any) -> str | None:
    """None while the device is still busy; empty when its time cannot be read."""
    try:
        if not events[1].query():
            return None
        elapsed_ns = round(events[0].elapsed_time(events[1]) * 1e6)
    except Exception as error:
        note("device time", error)
        return ""
    # An idle device that others use as well handles both events at once: nothing was measured.
    return f', "device_ns": {elapsed_ns}' if elapsed_ns > 0 else ""


class Anchor:
    """Decides which optimizer steps end a training step.

    The first optimizer that steps is the anchor: each of its steps ends a training step. Others
    that step in between (a GAN's second one) belong to the same training step. An optimizer that
    steps twice while the anchor does not becomes the anchor, and its first step counts too.
    """

    def __init__(self) -> None:
        self._anchor: Callable[[], Any] = lambda: None
        self._others: weakref.WeakSet[Any] | None = None  # stepped once since the anchor did
        self._known: weakref.WeakSet[Any] | None = None  # ever

    @property
    def others(self) -> dict[int, Callable[[], Any]]:
        """Optimizers that stepped without ending a step, by their identity."""
        known = self._known
        return {id(one): weakref.ref(one) for one in known} if known else {}

    @property
    def latest(self) -> Callable[[], Any]:
        """The anchor, held weakly."""
        return self._anchor

    def ends_steps(self, optimizer: Any) -> int:
        """Call once for every optimizer step: how many training steps have ended by now."""
        anchor = self._anchor()
        again = self._others is not None and optimizer in self._others
        if anchor is optimizer or anchor is None or again:
            self._anchor = weakref.ref(optimizer)
            self._others = None
            return 2 if again else 1
        if self._others is None:
            self._others = weakref.WeakSet()
        if self._known is None:
            self._known = weakref.WeakSet()
        self._others.add(optimizer)
        self._known.add(optimizer)
        return 0


class DeviceClock:
    """Device time of steps from CUDA events: recorded on the hot path, read in the background."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._stream: Any = None
        self._last: Any = None
        self._cut = False  # a graph was captured since

    @classmethod
    def here(cls) -> DeviceClock | None:
        """None without a CUDA device."""
        cuda = sys.modules["torch"].cuda
        return cls(cuda) if cuda.is_available() else None

    def restart(self) -> None:
        """The next step's device time begins now."""
        self._cut = True
        self.mark()

    def cut(self) -> None:
        """What has run since the last mark is no step, and no stretch of steps."""
        self._cut = True

    def mark(self) -> Any:
        """The pair of events around the step that just ended, or None where there is none."""
        if not self._cuda.is_initialized():
            return None
        if not gate.lets_through():
            self._cut = True
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record(self._current_stream())
        pair = None if self._last is None or self._cut else (self._last, event)
        self._last, self._cut = event, False
        return pair

    def _current_stream(self) -> Any:
        """Asking torch for it takes longer than recording the event: only if it is another one."""
        torch_c = sys.modules["torch"]._C
        current = getattr(torch_c, "_cuda_getCurrentRawStream", None)
        if current is None:
            return None
        device = torch_c._cuda_getDevice()
        here = (current(device), device)  # every device has a default stream, and all are 0
        if self._stream is None or self._stream[0] != here:
            self._stream = (here, self._cuda.current_stream())
        return self._stream[1]


# What the operating system and the allocator say when a step ends.
#
# The training thread reads raw values and passes them on; the writer's thread works out what
# changed. Values are read so rarely that reading stays under BUDGET of the time, and after every
# step that is longer than usual. With cold caches a reading takes some 40 us.

BUDGET = 0.001
LONG = 1.5  # times a usual step
# Smaller changes are not written: their absence means less than this.
FLOORS = {"cpu_wait_ns": 500_000, "major_faults": 1, "retries": 1}
_SCHEDULER, _MEMORY = "/proc/thread-self/schedstat", "/proc/self/statm"

Counters = tuple[bytes | None, int | None]  # schedstat's text, major faults
Memory = bytes | tuple[int, int] | None  # statm's text, or the device's bytes and retries
# When the step began, if that was not where the one before ended; when it ended; memory.
Reading = tuple[Counters | None, Counters, Memory]


class StepMeter:
    """Created in the training thread, which alone calls it."""

    def __init__(self) -> None:
        self._scheduler = _opened(_SCHEDULER)
        self._statm = _opened(_MEMORY)
        self._thread = getattr(resource, "RUSAGE_THREAD", None)
        self._on_device = False
        self._ended = self._due = perf_counter_ns()
        self._usual = 0
        self._cost = sys.maxsize
        self._began: Counters | None = None
        self._failed = False  # to read memory

    def read(self, now: int, longest: int = 0) -> Reading | None:
        """A step ended at `now`, by the performance counter; or several did, of which the `longest`
        took so long."""
        wall, usual = longest or now - self._ended, self._usual
        self._ended = now
        self._usual = usual + (min(wall, 2 * usual) - usual) // 8 if usual else wall
        if now < self._due and wall <= LONG * usual:
            return None
        return self._read()

    @never_raise
    def _read(self) -> Reading:
        began_ns = perf_counter_ns()
        began, self._began = self._began, None
        reading = (began, self._counters(), None if self._failed else self._memory())
        ended_ns = perf_counter_ns()
        # The quickest one: on a busy machine others may run in the middle of it.
        self._cost = min(self._cost, ended_ns - began_ns)
        self._due = ended_ns + int(self._cost / BUDGET)
        return reading

    @never_raise
    def restart(self, now: int) -> None:
        """A step begins; what was counted since the last one ended is ours."""
        self._ended = now
        self._began = self._counters()

    def content(self) -> dict[str, Any]:
        """What is read at step ends, for rank.json."""
        return {
            "cpu_wait_ns": self._scheduler is not None,
            "major_faults": self._thread is not None,
            "memory": "device" if self._on_device else "host" if self._statm is not None else None,
            "floors": FLOORS,
        }

    def _counters(self) -> Counters:
        waited = os.pread(self._scheduler, 96, 0) if self._scheduler is not None else None
        if self._thread is None:
            return waited, None
        return waited, resource.getrusage(self._thread).ru_majflt

    def _memory(self) -> Memory:
        try:
            reading = self._device_memory()
            if reading is not None or self._on_device or self._statm is None:
                return reading
            return os.pread(self._statm, 96, 0)
        except Exception as error:
            self._failed = True
            note("memory at step ends", error)
            return None

    def _device_memory(self) -> tuple[int, int] | None:
        """None before CUDA is initialised, and while a graph is captured."""
        cuda: Any = sys.modules["torch"].cuda
        if not cuda.is_initialized() or not gate.lets_through():
            return None
        self._on_device = True
        statistics = sys.modules["torch"]._C._cuda_memoryStats(cuda.current_device())
        allocated = statistics["allocated_bytes"]["all"]["current"]
        return allocated, statistics["num_alloc_retries"]


class Readings:
    """In the writer's thread: what changed between two readings."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._page = resource.getpagesize()

    def changes(self, reading: Reading | None) -> dict[str, int]:
        """Of the step that ended with this reading: counters' growth, and memory as it is."""
        if reading is None:
            return {}
        began, ended, memory = reading
        if began is not None:
            self._count(began)
        values = self._count(ended)
        if isinstance(memory, tuple):
            values |= {"allocated_bytes": memory[0], **self._growth("retries", memory[1])}
        elif memory:
            values["allocated_bytes"] = int(memory.split()[1]) * self._page
        return values

    def _count(self, counters: Counters) -> dict[str, int]:
        scheduler, faults = counters
        waited = self._growth("cpu_wait_ns", int(scheduler.split()[1])) if scheduler else {}
        return waited if faults is None else {**waited, **self._growth("major_faults", faults)}

    def _growth(self, name: str, now: int) -> dict[str, int]:
        before = self._before.get(name, now)
        self._before[name] = now
        return {name: now - before} if now - before >= FLOORS[name] else {}


def _opened(path: str) -> int | None:
    """None where the system does not have it, or no more files can be opened."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None
