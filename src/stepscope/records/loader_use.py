"""A DataLoader and what its batches cost, as capture wrote it (rank.json, "loaders")."""

from __future__ import annotations

import msgspec

from stepscope.records.limits import Bytes, Count, DurationNs, Threads  # noqa: TC001  (decoded)
from stepscope.records.place import Place

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
        """None if it was counted fewer than `least` times."""
        return self.wall_ns / self.count if self.count >= max(1, least) else None

    def mean_cpu_ns(self, least: int = _ENOUGH) -> float | None:
        """None if it was counted fewer than `least` times."""
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
    def feeding(self) -> LoaderUse | None:
        """The one that fed most of the training."""
        trained = [loader for loader in self.loaders if loader.trains and loader.batches]
        return max(trained, key=lambda loader: loader.batches, default=None)
