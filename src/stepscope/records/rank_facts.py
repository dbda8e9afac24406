"""What capture wrote about one rank (rank.json, links.json): its host's load, its data
loaders, where its optimizer is called, its connections and place in the network.
"""

from __future__ import annotations

import msgspec

from stepscope.records.quality import Bytes, Cores, Count, DurationNs, Share, Threads
from stepscope.records.source_lines import Place

# What one process had of its machine during plain steps: threads, cores, and what else ran.
#
# As capture wrote it (rank.json, "host_load"); None if the system does not report it.


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


# A DataLoader and what its batches cost, as capture wrote it (rank.json, "loaders").

_ENOUGH = 5  # of anything that is counted, for a mean


class CodePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a function of the script begins."""

    file: str = ""
    line: Count = 0
    function: str = ""

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, function=self.function)


class Sum(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and how long altogether."""

    count: Count = 0
    wall_ns: DurationNs = 0
    cpu_ns: DurationNs = 0  # processor time of the thread

    def mean_ns(self, least: int = _ENOUGH) -> float | None:
        """Return None if it was counted fewer than `least` times."""
        return self.wall_ns / self.count if self.count >= max(1, least) else None

    def mean_cpu_ns(self, least: int = _ENOUGH) -> float | None:
        """Return None if it was counted fewer than `least` times."""
        return self.cpu_ns / self.count if self.count >= max(1, least) else None


class Making(Sum, frozen=True, kw_only=True):
    """Batches made inside workers, without the first of each."""

    process_ns: DurationNs = 0  # of the whole worker: making, pickling and sending
    core_wait_ns: DurationNs = 0  # ready, without a core
    first: Count = 0
    first_wall_ns: DurationNs = 0


class LoaderUse(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a loader, and sums over its batches."""

    workers: Threads
    persistent: bool = False
    prefetch: Count | None = None
    iterable: bool = False
    batch_size: Count | None = None
    pinned: bool = False
    dataset: str = ""  # its class
    made_at: CodePlace | None = None  # the dataset's own method that makes items
    collated_at: CodePlace | None = None  # None: torch's own function
    trains: bool = False
    epochs: Count = 0  # iterators that were created
    batches: Count = 0
    tensors: Count = 0  # of one batch
    batch_bytes: Bytes = 0
    other_values: Count = 0
    fetch: Sum = Sum()  # in the training thread, without the first batches of each epoch
    first: Sum = Sum()  # the first batch of each epoch
    start: Sum = Sum()  # creating the iterator, which starts workers
    end: Sum = Sum()  # after the last batch of an epoch
    make: Making | None = None  # inside the workers, if they were forked

    @property
    def epoch_batches(self) -> float | None:
        """Batches of an epoch; None until a second one began."""
        return self.batches / self.epochs if self.epochs > 1 else None


class Passing(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time that passing memory between processes takes on this machine."""

    hand_over_ns: DurationNs  # one file descriptor
    write_page_ns: DurationNs  # a page of shared memory, written first
    read_page_ns: DurationNs  # a page, read through another map and freed


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The process's loaders; rank.json's "data"."""

    loaders: tuple[LoaderUse, ...] = ()
    passing: Passing | None = None

    @property
    def feeding(self) -> tuple[LoaderUse, ...]:
        """Those that fed the training, the one that fed most of it first."""
        trained = (loader for loader in self.loaders if loader.trains and loader.batches)
        return tuple(sorted(trained, key=lambda loader: -loader.batches))


# Steps in which the host never waited for the device, as rank.json has them.


class HostStepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The host's own time of one step, by phase."""

    step: Count = 0
    fine: bool = False  # the queue was also emptied inside forward
    alone: bool = True  # no other rank trained: it was emptied inside the step, not only before it
    data_ns: DurationNs = 0
    forward_ns: DurationNs = 0
    backward_ns: DurationNs = 0
    optimizer_ns: DurationNs = 0
    stops: Count = 0
    blocking: Count = 0  # calls that would have waited for the device
    wait_ns: DurationNs = 0  # taken out of the phases


# Where the training calls its optimizer.


class OptimizerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The line whose call of `step` was the first of one optimizer."""

    optimizer: str  # its class: AdamW
    file: str
    line: Count
    function: str = ""

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, function=self.function)


# What a rank's TCP connections have sent, and what that says about the links between hosts.


class PeerTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's connections from one of its addresses to one other, from the first look to the
    last. Connections that sent less than a megabyte do not count."""

    local: str
    peer: str
    connections: Count = 1
    sent_bytes: Bytes
    busy_us: Count  # something was waiting to be sent or acknowledged; summed over connections
    receiver_limited_us: Count = 0  # of that, the receiver had no room
    retransmitted: Count = 0  # segments
    rtt_us: Count | None = None  # the shortest round trip
    delivery_bytes_s: Bytes | None = None  # the kernel's own estimate; median over looks


class RankLinks(msgspec.Struct, frozen=True, kw_only=True):
    """links.json."""

    addresses: list[str] = []  # by which others reach this rank's host
    peers: list[PeerTraffic] = []
    steps: list[Count] = []  # before which the first and the last look came
    device_mbit_s: dict[str, Count] = {}  # of the network device that has the address


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one host sent to those of another. Rates are those of one connection while
    it sends, in bytes per second."""

    sender: str
    receiver: str
    connections: int
    sent_bytes: int
    steady_bytes_s: float  # bytes / (busy - limited by the receiver)
    rate_bytes_s: float  # that, or the kernel's estimate where it is higher
    rtt_us: int | None
    retransmitted: int
    needs_step_ns: float  # how long the busiest connection needs for a step's bytes, at its rate
    device_bytes_s: float | None = None  # of the sender's network device


# Where a host stands in the network, as its environment tells. Unknown is None.


class NetworkPlace(msgspec.Struct, frozen=True, kw_only=True):
    rack: str | None = None
    switch: str | None = None  # the one that the host is plugged into
    switches: tuple[str, ...] = ()  # from the top of the network down to `switch`
