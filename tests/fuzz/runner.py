"""Many cases in worker processes: each has a time and a memory limit, and failures are kept."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from fuzz.mutate import driver, mutator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 20.0
MOST_BYTES = 1 << 30
_ADDRESS_SPACE = 8 << 30  # keeps a runaway from taking the machine with it
_HANGS_AFTER = 2 * SECONDS  # where not even an alarm ends it
_POLL_S = 0.5


class TooSlowError(BaseException):
    """Not an Exception: nothing in the code under test may catch it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A case that did not end as it must."""

    kind: str
    case: int
    cause: str  # equal causes are counted together
    details: str


@dataclass(kw_only=True)
class Tally:
    """What became of the cases."""

    ended: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    first: dict[str, Failure] = field(default_factory=dict)
    slowest_s: float = 0.0

    def add(self, outcome: str | Failure, seconds: float) -> None:
        self.slowest_s = max(self.slowest_s, seconds)
        if isinstance(outcome, Failure):
            self.causes[outcome.cause] += 1
            self.first.setdefault(outcome.cause, outcome)
        else:
            self.ended[outcome] += 1


def write_case(kind: str, seed: int, case: int, folder: Path) -> Path:
    """The input of that number; the same each time."""
    return mutator(kind)(Random(f"{seed}/{kind}/{case}"), folder)


def run_case(kind: str, seed: int, case: int, keep: Path | None = None) -> str | Failure:
    """Make one input and drive it; a failing one is copied to `keep`."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        work = Path(name)
        (work / "input").mkdir()
        try:
            path = write_case(kind, seed, case, work / "input")
        except Exception as error:  # a mutator that mutated what it needs itself
            return f"not made ({_cause(error)})"
        outcome = attempt(kind, case, path, work)
        if keep and isinstance(outcome, Failure):
            _keep(outcome, path, keep)
    return outcome


def attempt(kind: str, case: int, path: Path, work: Path) -> str | Failure:
    """Drive one input, within the limits."""
    before = _peak_bytes()  # making the input may have taken more than reading it does
    try:
        with own_folders(work), limited_time(SECONDS):
            outcome = driver(kind)(path, work)
    except (Exception, TooSlowError) as error:
        return Failure(
            kind=kind, case=case, cause=_cause(error), details=traceback.format_exc(limit=-12)
        )
    peak = _peak_bytes()
    if peak > max(MOST_BYTES, before):
        return Failure(kind=kind, case=case, cause="memory", details=f"{peak >> 20} MB")
    return outcome


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def own_folders(work: Path) -> Iterator[None]:
    """Nothing of the user's is read or written."""
    names = ("STEPSCOPE_CACHE_DIR", "STEPSCOPE_PROFILES", "STEPSCOPE_RECORD")
    before = {name: os.environ.get(name) for name in (*names, "STEPSCOPE_DEBUG")}
    os.environ |= {name: str(work / name.lower()) for name in names} | {"STEPSCOPE_DEBUG": "1"}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TooSlowError(f"took over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _cause(error: BaseException) -> str:
    """The exception and the innermost line of ours that it came from."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}stepscope{os.sep}" in frame.filename
    ]
    place = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
    name = place.filename.split(f"{os.sep}stepscope{os.sep}")[-1]
    what = f": {error}"[:60] if type(error).__name__ == "UnsoundError" else ""
    return f"{type(error).__name__}{what} at {name}:{place.lineno}"


def _keep(failure: Failure, path: Path, keep: Path) -> None:
    folder = keep / f"{failure.kind}-{failure.case}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "why.txt").write_text(f"{failure.cause}\n\n{failure.details}")
    copy: Callable[..., Any] = shutil.copytree if path.is_dir() else shutil.copy
    with suppress(OSError):  # of pipes there is no copy
        copy(path, folder / path.name, **({"symlinks": True} if path.is_dir() else {}))


def run_many(
    kind: str, cases: range, *, seed: int, workers: int, keep: Path, progress: Any = None
) -> Tally:
    """All cases of a kind; a worker that dies or hangs costs its case and is replaced."""
    tally = Tally()
    team = [_Worker(kind, seed, keep) for _ in range(workers)]
    numbers = iter(cases)
    busy = {worker for worker in team if worker.give(next(numbers, None))}
    while busy:
        for worker in list(busy):
            done = worker.take()
            if done is None:
                continue
            tally.add(*done)
            if progress:
                progress(tally)
            if not worker.give(next(numbers, None)):
                busy.discard(worker)
    for worker in team:
        worker.end()
    return tally


class _Worker:
    """A process that runs one case after another."""

    def __init__(self, kind: str, seed: int, keep: Path) -> None:
        self._settings = (kind, seed, keep)
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._todo, self._done = context.SimpleQueue(), context.Queue()
        self._process = context.Process(
            target=_serve, args=(*self._settings, self._todo, self._done), daemon=True
        )
        self._process.start()

    def give(self, case: int | None) -> bool:
        if case is not None:
            self._case, self._since = case, time.monotonic()
            self._todo.put(case)
        return case is not None

    def take(self) -> tuple[str | Failure, float] | None:
        """The outcome and its seconds, or None while the case runs."""
        seconds = time.monotonic() - self._since
        try:
            outcome: str | Failure = self._done.get(timeout=_POLL_S / 50)
        except queue.Empty:
            if self._process.is_alive() and seconds < _HANGS_AFTER + 10:
                return None
            outcome = self._lost()
        if isinstance(outcome, Failure) and outcome.cause == "memory":
            self._replace()  # a peak stays with its process
        return outcome, seconds

    def _lost(self) -> Failure:
        self._process.join(_POLL_S)
        code = self._process.exitcode
        cause = "hangs" if code is None else f"the process ended with {code}"
        kind, seed, keep = self._settings
        failure = Failure(kind=kind, case=self._case, cause=cause, details=f"seed {seed}")
        with tempfile.TemporaryDirectory(prefix="fuzz-") as name, contextlib.suppress(Exception):
            _keep(failure, write_case(kind, seed, self._case, Path(name)), keep)
        self._replace()
        return failure

    def _replace(self) -> None:
        self.end()
        self._start()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(kind: str, seed: int, keep: Path, todo: Any, done: Any) -> None:
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    while True:
        done.put(run_case(kind, seed, todo.get(), keep))
