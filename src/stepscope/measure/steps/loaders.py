"""What feeds the training: each DataLoader's settings, how large its batches are, and what
making and passing them costs.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import socket
import sys
from collections import Counter
from collections.abc import Collection
from statistics import median
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import never_raise
from stepscope.measure.steps.phases import EXHAUSTED

if TYPE_CHECKING:
    from stepscope.measure.steps.pace import Pace

# Counted while the training runs, a few additions for each batch: the time to make a batch (inside
# the workers too, where they were forked), the processor time to receive one, and what starting the
# workers takes. Nothing is asked of the dataset: only what torch has stored is read.

_MOST_LOADERS, _MOST_WORKERS = 16, 256
_LOOKED_AT = 8  # batches whose tensors are counted
_MOST_PARTS, _DEEPEST = 2_000, 4
_FIELDS = ("count", "wall_ns", "cpu_ns", "process_ns", "core_wait_ns", "first", "first_wall_ns")
_WRAPPERS = 4  # Subset, ConcatDataset and others of torch's own around the user's dataset
_CACHED = 4  # batches at the beginning of each epoch, which workers prepared meanwhile


class MakeBoard:
    """Sums that forked workers write and the training process reads: one row for each worker."""

    def __init__(self, workers: int) -> None:
        self._rows = min(workers, _MOST_WORKERS)
        self._memory = mmap.mmap(-1, 8 * len(_FIELDS) * max(1, self._rows))
        self._sums = memoryview(self._memory).cast("q")
        self._process_ns = self._waited_ns = 0  # in a worker: when its last batch was done

    def made(self, worker: int, wall_ns: int, cpu_ns: int) -> None:
        """In a worker: one batch is ready. The first one of a process warms caches up."""
        if worker >= self._rows:
            return
        now, before = process_time_ns(), self._process_ns
        waited, waited_before = _core_wait_ns(), self._waited_ns
        self._process_ns, self._waited_ns = now, waited
        at, sums = worker * len(_FIELDS), self._sums
        if not before:
            sums[at + 5] += 1
            sums[at + 6] += wall_ns
            return
        sums[at] += 1
        sums[at + 1] += wall_ns
        sums[at + 2] += cpu_ns
        sums[at + 3] += now - before  # pickling and sending the one before is part of it
        sums[at + 4] += waited - waited_before

    def forget(self) -> None:
        """In a new worker, which has made nothing yet."""
        self._process_ns = 0

    def content(self) -> dict[str, int]:
        rows = [self._sums[at : at + len(_FIELDS)] for at in self._starts()]
        return {name: sum(row[at] for row in rows) for at, name in enumerate(_FIELDS)}

    def _starts(self) -> range:
        return range(0, self._rows * len(_FIELDS), len(_FIELDS))


def _core_wait_ns() -> int:
    """How long this thread was ready and had no core; 0 where the system does not tell."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            return int(os.read(file, 256).split()[1])
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return 0


class WatchedLoader:
    """One loader, or several of the same settings: what its batches cost."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.board = MakeBoard(facts["workers"]) if facts["workers"] else None
        self.samplers: set[int] = set()
        self.trains = False
        self._sums: Counter[str] = Counter()
        self._fresh = 0  # batches since the iterator was created
        self._looked: list[tuple[int, int, int]] = []

    def created(self, wall_ns: int) -> None:
        """An epoch begins: its iterator exists and its workers are started."""
        self._sums.update(epochs=1, start_ns=wall_ns)
        self._fresh = 0

    def came(self, wall_ns: int, cpu_ns: int, batch: Any, elements: int, *, plain: bool) -> None:
        """A batch, or word that there is none any more."""
        if elements == EXHAUSTED:
            self.ended(wall_ns)
        else:
            self.fetched(wall_ns, cpu_ns, batch, plain=plain)

    @never_raise
    def fetched(self, wall_ns: int, cpu_ns: int, batch: Any, *, plain: bool) -> None:
        """A batch came; `plain`: no profiler ran. The first ones of an epoch wait for a start."""
        self._fresh += 1
        sums = self._sums
        sums["batches"] += 1
        if self._fresh == 1:
            sums["first"] += 1
            sums["first_ns"] += wall_ns
        if len(self._looked) < _LOOKED_AT:
            self._look(batch)
        elif plain and self._fresh > _CACHED:
            sums["count"] += 1
            sums["wall_ns"] += wall_ns
            sums["cpu_ns"] += cpu_ns

    def passed(self, pace: Pace) -> None:
        """More came in steps that were not noted."""
        batches, pace.fetched = pace.fetched, 0
        self._fresh += batches
        self._sums["batches"] += batches

    @never_raise
    def ended(self, wall_ns: int) -> None:
        """The loader is exhausted; workers that do not persist have ended."""
        self._sums.update(ends=1, end_ns=wall_ns)

    @never_raise
    def _look(self, batch: Any) -> None:
        self._looked.append((0, 0, 0))
        self._looked[-1] = count_parts(batch)

    def content(self) -> dict[str, Any]:
        looked = max(1, len(self._looked))
        tensors, size, others = (
            (sum(column) for column in zip(*self._looked, strict=True))
            if (self._looked)
            else (0, 0, 0)
        )
        sums = self._sums
        return {
            **self.facts,
            "trains": self.trains,
            "epochs": sums["epochs"],
            "batches": sums["batches"],
            "tensors": round(tensors / looked),
            "batch_bytes": round(size / looked),
            "other_values": round(others / looked),
            "fetch": {name: sums[name] for name in ("count", "wall_ns", "cpu_ns")},
            "first": {"count": sums["first"], "wall_ns": sums["first_ns"]},
            "start": {"count": sums["epochs"], "wall_ns": sums["start_ns"]},
            "end": {"count": sums["ends"], "wall_ns": sums["end_ns"]},
            "make": self.board.content() if self.board is not None else None,
        }


class Loaders:
    """All DataLoaders of the process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._uses: dict[tuple[Any, ...], WatchedLoader] = {}
        self._by_sampler: dict[int, WatchedLoader] = {}
        self.begun: WatchedLoader | None = None  # whose iterator is created: workers are forked now

    @never_raise
    def begins(self, loader: Any) -> None:
        """An iterator of this loader is about to be created."""
        self.begun = None
        facts = describe_loader(loader)
        key = tuple(map(str, facts.values()))
        use = self._uses.get(key)
        if use is None and len(self._uses) < _MOST_LOADERS:
            use = self._uses[key] = WatchedLoader(facts)
        self.begun = use
        if use is not None:
            sampler = id(getattr(loader, "_index_sampler", None))
            self._by_sampler[sampler] = use
            use.samplers.add(sampler)
            if use.board is not None:
                use.board.forget()

    @never_raise
    def created(self, wall_ns: int) -> None:
        """The iterator exists, and its workers were forked."""
        begun, self.begun = self.begun, None
        if begun is not None:
            begun.created(wall_ns)

    def of_sampler(self, sampler: int) -> WatchedLoader | None:
        return self._by_sampler.get(sampler)

    @never_raise
    def made(self, wall_ns: int, cpu_ns: int) -> None:
        """In a worker that was forked while its loader's iterator was created."""
        if os.getpid() == self._pid or self.begun is None or self.begun.board is None:
            return
        info = sys.modules["torch.utils.data"].get_worker_info()
        if info is not None:
            self.begun.board.made(info.id, wall_ns, cpu_ns)

    @never_raise
    def content(self, trained: Collection[int], *, last: bool) -> dict[str, Any]:
        """For rank.json; `trained`: samplers of the loaders whose batches were trained on; `last`:
        the run is over, so there is time to try what passing a batch costs."""
        for use in self._uses.values():
            use.trains = not use.samplers.isdisjoint(trained)
        feeds = any(use.trains for use in self._uses.values())
        return {
            "loaders": [use.content() for use in self._uses.values()],
            "passing": passing_costs() if last and feeds else None,
        }


def describe_loader(loader: Any) -> dict[str, Any]:
    """What the loader was given, without running any code of the script."""
    dataset = _own_dataset(loader.dataset)
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    kind = type(dataset)
    iterable = bool(getattr(loader, "_dataset_kind", 0))
    names = ("__iter__",) if iterable else ("__getitems__", "__getitem__")
    method = next((found for name in names if (found := getattr(kind, name, None))), None)
    return {
        "workers": int(loader.num_workers),
        "persistent": bool(loader.persistent_workers),
        "prefetch": loader.prefetch_factor if isinstance(loader.prefetch_factor, int) else None,
        "iterable": iterable,
        "batch_size": size if isinstance(size, int) else None,
        "pinned": bool(loader.pin_memory),
        "dataset": kind.__name__,
        "made_at": _place(method),
        "collated_at": _place(loader.collate_fn),
    }


def _own_dataset(dataset: Any) -> Any:
    """The user's own one inside torch's Subset, ConcatDataset and the like."""
    for _ in range(_WRAPPERS):
        if not type(dataset).__module__.startswith("torch.utils.data"):
            break
        stored = getattr(dataset, "__dict__", {})
        several = stored.get("datasets")
        first = several[0] if isinstance(several, (list, tuple)) and several else None
        inside = stored.get("dataset", first)
        if inside is None:
            break
        dataset = inside
    return dataset


def _place(function: Any) -> dict[str, Any] | None:
    """Where a function was written; None for what torch wrote itself."""
    function = getattr(function, "func", function)  # functools.partial
    if not hasattr(function, "__code__") and not isinstance(function, type):
        function = vars(type(function)).get("__call__")
    function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None) or ""
    code = getattr(function, "__code__", None)
    if code is None or module.split(".")[0] == "torch":
        return None
    return {
        "file": code.co_filename,
        "line": code.co_firstlineno,
        "function": code.co_qualname if hasattr(code, "co_qualname") else code.co_name,
    }


def count_parts(batch: Any) -> tuple[int, int, int]:
    """Tensors of a batch, their bytes, and its other values."""
    tensor = sys.modules["torch"].Tensor
    tensors = size = others = 0
    waiting = [(batch, _DEEPEST)]
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part, deeper = waiting.pop()
        kind = type(part)
        if issubclass(kind, tensor):
            tensors += 1
            size += part.numel() * part.element_size()
            continue
        inside = list(parts_of(part)) if deeper else []
        others += not inside
        waiting += [(value, deeper - 1) for value in inside[:_MOST_PARTS]]
    return tensors, size, others


# How large a batch is, from the shapes of its tensors: nothing is computed or copied.

_MOST_COUNTED_PARTS = 64
_DEEPEST_COUNTED = 3
_PAIR = 2  # inputs and labels
_TOKENS = "input_ids"
_PLAIN = (str, int, float, bool, bytes, type(None))


class _TooManyPartsError(Exception):
    pass


def count_elements(batch: Any) -> int:
    """Elements of the tensors in a batch; 0 when it has none, or too many to look at each time.

    A batch with `input_ids` counts its tokens alone: masks and labels only repeat their shape.
    """
    try:
        tensor = sys.modules["torch"].Tensor
        kind = type(batch)
        # Most batches are one of these. A call costs much while the processor's caches are cold.
        if kind is dict and type(tokens := batch.get(_TOKENS)) is tensor:
            return int(tokens.numel())
        if (kind is list or kind is tuple) and len(batch) == _PAIR:
            first, second = batch
            if type(first) is tensor and type(second) is tensor:
                return int(first.numel() + second.numel())
        return _count(batch, tensor, [_MOST_COUNTED_PARTS], _DEEPEST_COUNTED)
    except Exception:
        return 0


def _count(part: Any, tensor: Any, left: list[int], deeper: int) -> int:
    left[0] -= 1
    if left[0] < 0:
        raise _TooManyPartsError
    kind = type(part)
    if issubclass(kind, tensor):
        return int(part.numel())
    inside = _parts(part, kind) if deeper and kind not in _PLAIN else ()
    total = 0
    for value in inside:
        total += _count(value, tensor, left, deeper - 1)
    return total


def _parts(part: Any, kind: type) -> Any:
    """What a container holds; a list of names holds nothing of interest."""
    if issubclass(kind, (tuple, list)):
        return () if part and type(part[0]) in _PLAIN else part
    held = part if issubclass(kind, dict) else _held_dict(part)
    tokens = held.get(_TOKENS)
    return (tokens,) if tokens is not None else held.values()


def _held_dict(part: Any) -> dict[Any, Any]:
    """The dict in a BatchEncoding (`data`) or a graph (`_store`), else the object's attributes.

    An attribute may be computed when it is asked for: only stored ones are read.
    """
    own: dict[Any, Any] = object.__getattribute__(part, "__dict__")
    store = own.get("_store")
    if store is not None:
        own = object.__getattribute__(store, "__dict__")
    for name in ("_mapping", "data"):
        if isinstance(own.get(name), dict):
            return own[name]  # type: ignore[no-any-return]
    return own


def parts_of(part: Any) -> Any:
    """Everything that a container of a batch holds; nothing for a plain value."""
    kind = type(part)
    if kind in _PLAIN:
        return ()
    if issubclass(kind, (tuple, list)):
        return part
    try:
        return (part if issubclass(kind, dict) else _held_dict(part)).values()
    except AttributeError:
        return ()


# What passing tensors between two processes costs on this machine, tried once when a run ends.
#
# torch sends a tensor of a worker as a file descriptor: the training process connects to the
# worker's socket, both prove that they know a key, and the memory is mapped. The same calls are
# made here in one thread, on memory of our own, in about a hundredth of a second. Times are
# processor time.

_TIMES, _PAGES = 9, 256
_MESSAGE = b"x" * 48


@never_raise
def passing_costs() -> dict[str, int] | None:
    """For rank.json; None on systems other than Linux."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "send_fds"):
        return None
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("stepscope-pass-probe")
        stack.callback(os.close, memory)
        os.ftruncate(memory, 1)
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = f"\0stepscope-{os.getpid()}-{perf_counter_ns()}"
        server.bind(address)
        server.listen(1)
        handed = [_hand_over(server, address, memory) for _ in range(_TIMES)]
    pages = [_write_and_read() for _ in range(_TIMES)]
    return {
        "hand_over_ns": round(median(handed)),
        "write_page_ns": round(median(write for write, _ in pages)),
        "read_page_ns": round(median(read for _, read in pages)),
    }


def _hand_over(server: socket.socket, address: str, memory: int) -> int:
    began = thread_time_ns()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        accepted, _ = server.accept()
        with accepted:
            for _ in range(2):
                for sender, receiver in ((accepted, client), (client, accepted)):
                    sender.sendall(hmac.new(b"key", _MESSAGE, "sha256").digest())
                    receiver.recv(256)
            socket.send_fds(accepted, [b"f"], [memory])
            _, received, _, _ = socket.recv_fds(client, 1, 1)
            for descriptor in received:
                os.close(descriptor)
    return thread_time_ns() - began


def _write_and_read() -> tuple[float, float]:
    """One page of shared memory: to write it first, and to read and free it through another map."""
    page = mmap.PAGESIZE
    memory = os.memfd_create("stepscope-pass-probe")
    try:
        os.ftruncate(memory, _PAGES * page)
        began = thread_time_ns()
        with mmap.mmap(memory, _PAGES * page) as writing:
            for at in range(0, _PAGES * page, page):
                writing[at] = 1
            written = thread_time_ns()
            with mmap.mmap(memory, _PAGES * page) as reading:
                for at in range(0, _PAGES * page, page):
                    reading[at]
    finally:
        os.close(memory)
    return (written - began) / _PAGES, (thread_time_ns() - written) / _PAGES
