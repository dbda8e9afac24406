"""Every step that a rank ran, as columns: steps.jsonl and its packed parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]

# Each nanosecond of a step belongs to one of these; they add up to its wall time.
USUAL_PHASES = ("data", "forward", "backward", "optimizer", "other")
RARE_PHASES = ("evaluation", "checkpoint", "gc", "compile", "between_epochs")
ALL_PHASES = (*USUAL_PHASES, *RARE_PHASES)
_HOST_PACE = 0.9  # of the device's time for a step: a host that takes less runs ahead


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of steps, each once. A column that was not captured is None."""

    number: Ints
    wall_ns: Ints
    end_unix_ns: Ints  # 0 where it was not captured
    phases_ns: dict[str, Ints]  # by phase; a phase that never ran is not in it
    window: Flags  # the profiler ran
    memory: Flags  # our own work ran in it: the memory step, and those that measure the host
    whole: Flags  # its beginning and end were seen
    # Time between two epochs: evaluation, checkpoints and the rest. It lies inside wall_ns and is
    # counted in the phases too, but is no part of the step's own time.
    epoch_gap_ns: Ints | None = None
    device_ns: Ints | None = None  # -1 where it was not measured
    # Of the tensors in the batches that the step trained on; of input_ids alone where a batch has
    # them; 0 where not known.
    elements: Ints | None = None
    allocated_bytes: Ints | None = None  # when the step ended; -1 where not read
    # A line leaves these out when they are under a floor (0.5 ms, one, one): then the column has 0.
    # `counters` in rank.json says whether they were read at all. They count since the last reading,
    # which came with allocated_bytes; every step 1.5 times as long as usual ends with one.
    cpu_wait_ns: Ints | None = None  # the training thread was ready to run and had no core
    major_faults: Ints | None = None  # pages read from disk
    retries: Ints | None = None  # of the device's allocator
    graphs: Ints | None = None  # compiled by dynamo in this step

    def __len__(self) -> int:
        return len(self.number)

    @property
    def plain(self) -> Flags:
        """Seen whole, on the device too, with neither the profiler nor the memory capture at
        work."""
        return self.whole & ~self.window & ~self.memory & ~self.unfinished

    @property
    def unfinished(self) -> Flags:
        """The last steps, if the device was not through with them when the run ended and the host
        was quicker than it: nobody knows how long they took."""
        rest = np.zeros(len(self), np.bool_)
        if self.device_ns is None or not (self.device_ns >= 0).any():
            return rest
        timed = np.flatnonzero(self.device_ns >= 0)
        last = int(timed[-1]) + 1
        host_ns, device_ns = self.wall_ns[last:], self.device_ns[timed]
        if len(host_ns):
            rest[last:] = host_ns.mean() < _HOST_PACE * float(np.median(device_ns))
        return rest

    @property
    def step_ns(self) -> Ints:
        """Each step's own time: the device's if it was measured, else the host's; never the time
        between epochs."""
        own = self.wall_ns
        if self.device_ns is not None:
            own = np.where(self.device_ns >= 0, self.device_ns, own)
        return own if self.epoch_gap_ns is None else np.maximum(own - self.epoch_gap_ns, 0)
