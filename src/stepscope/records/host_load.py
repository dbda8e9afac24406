"""What one process had of its machine during plain steps: threads, cores, and what else ran.

As capture wrote it (rank.json, "host_load"); None if the system does not report it.
"""

from __future__ import annotations

import msgspec

from stepscope.records.limits import Cores, Count, DurationNs, Share, Threads  # noqa: TC001  (decoded)


class OtherProgram(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of one program outside the job."""

    name: str
    cores: Cores  # kept busy by it


class PlainSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Counters over the steps outside the profiler's window and the memory step."""

    steps: Count
    wall_ns: DurationNs
    user_ns: DurationNs | None = None  # processor time of this process, all threads
    system_ns: DurationNs | None = None
    voluntary: Count | None = None  # context switches: it waited for something
    involuntary: Count | None = None  # context switches: it lost its core
    waiting_ns: DurationNs | None = None  # threads that were ready and had no core, summed
    training_waiting_ns: DurationNs | None = None  # the training thread's part of that
    busy_ns: DurationNs | None = None  # the cores it may use, busy with any process
    stolen_ns: DurationNs | None = None  # those cores, taken by other virtual machines
    throttled_ns: DurationNs | None = None  # stopped by the control group's quota
    job_ns: DurationNs | None = None  # processor time of the job's processes on this machine
    others: tuple[OtherProgram, ...] = ()

    @property
    def used_cores(self) -> float | None:
        """The cores that this process kept busy."""
        if self.user_ns is None or self.system_ns is None or not self.wall_ns:
            return None
        return (self.user_ns + self.system_ns) / self.wall_ns

    @property
    def waiting_share(self) -> float | None:
        """The share of the steps in which the training thread was ready and had no core."""
        if self.training_waiting_ns is None or not self.wall_ns:
            return None
        return min(1.0, self.training_waiting_ns / self.wall_ns)

    @property
    def asleep_share(self) -> float | None:
        """The share of the steps in which the training thread neither ran nor waited for a core:
        at least so much, as other threads of the process may have used some of its time."""
        if self.used_cores is None or self.waiting_share is None:
            return None
        return max(0.0, 1.0 - self.used_cores - self.waiting_share)

    @property
    def other_cores(self) -> float | None:
        """The cores that processes outside the job kept busy."""
        if self.busy_ns is None or self.job_ns is None or not self.wall_ns:
            return None
        return max(0.0, self.busy_ns - self.job_ns) / self.wall_ns

    @property
    def stolen_cores(self) -> float:
        """The cores that other virtual machines took."""
        return (self.stolen_ns or 0) / self.wall_ns if self.wall_ns else 0.0


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    threads: Threads
    interop_threads: Threads | None = None
    variables: dict[str, str] = {}  # environment variables that are set, such as OMP_NUM_THREADS
    cores: Threads | None = None  # on which the process may run
    quota_cores: Cores | None = None  # processor time that its control group allows
    machine_cores: Threads | None = None
    local_ranks: Threads | None = None  # of the job on this machine
    flush_denormal: bool | None = None
    denormal_share: Share | None = None  # of sampled parameters, gradients and optimizer state
    capability: str | None = None  # the vector instructions that torch uses
    offered: str | None = None  # the widest vector instructions of the processor
    onednn: bool | None = None
    plain: PlainSteps | None = None

    @property
    def room(self) -> float | None:
        """The cores that the job's ranks on this machine can use at once."""
        limits = [limit for limit in (self.cores, self.quota_cores) if limit]
        return float(min(limits)) if limits else None

    @property
    def job_threads(self) -> int:
        """The compute threads of all ranks on this machine."""
        return self.threads * max(1, self.local_ranks or 1)
