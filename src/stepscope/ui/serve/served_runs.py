"""Hold everything that the pages are made from: folders, the index kept up to date in the
background, tags, and the child processes that do heavy work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepscope import __version__
from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError, UsageError
from stepscope.records.folders import user_folder
from stepscope.text.figures import duration
from stepscope.trace.files import MissingFileError, open_to_append, read_whole
from stepscope.ui.html.render import write_atomically
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import ask_line, end_group
from stepscope.ui.serve.listed_runs import (
    BROKEN,
    RUNNING,
    IndexedRun,
    RunIndex,
    RunsDirectory,
    RunSummary,
    text_of,
)
from stepscope.ui.words import one_line

_WORKERS = 2
_MOST_WAITING = 16
_MOST_PAGES = 64
REQUEST_LIMIT_S = 120.0
# Raise it whenever kept pages should be made again.
_PAGES_VERSION = "1"


class GoneError(StepscopeError):
    """The run is not in the list, or its folder has been removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRuns:
    """One served folder."""

    directory: RunsDirectory
    index: RunIndex
    tags: RunTags
    keeper: IndexKeeper
    pool: WorkerPool
    pages: Path

    @classmethod
    def of_folder(cls, root: Path, *, rebuild: bool = False) -> ServedRuns:
        directory = RunsDirectory(root)
        own = cache_folder(directory.root)
        pages = own / "pages"
        pages.mkdir(exist_ok=True, mode=0o700)
        index = RunIndex(own, rebuild=rebuild)
        return cls(
            directory=directory,
            index=index,
            tags=RunTags(tags_file(directory.root)),
            keeper=IndexKeeper(directory, index),
            pool=WorkerPool(_WORKERS, _MOST_WAITING),
            pages=pages,
        )

    def close(self) -> None:
        self.pool.close()
        self.keeper.stop()
        self.index.close()

    def run(self, run_id: str) -> IndexedRun:
        """GoneError if it is not known."""
        run = self.index.find(run_id)
        if run is None:
            raise GoneError("there is no such run: it was removed, or never was here")
        return run

    def folder(self, run: IndexedRun) -> Path:
        """Return where it is. GoneError if it was removed, NotCapturedError if it is no run."""
        if run.kind == "none":
            raise NotCapturedError(f"{run.name} {run.problem}")
        folder = self.directory.folder_of(run.id)
        if folder is None:
            raise GoneError(f"the run {run.name} has been removed, or cannot be read any more")
        return folder

    def report(self, run: IndexedRun) -> Path:
        """Return the file with the run's report, made if the run has changed since the last
        time.
        """
        return self._page([run], job="report", path=text_of(self.folder(run)))

    def comparison(self, a: IndexedRun, b: IndexedRun) -> Path:
        a_path, b_path = text_of(self.folder(a)), text_of(self.folder(b))
        return self._page([a, b], job="compare", a=a_path, b=b_path)

    def predictions(self, run: IndexedRun, settings: Sequence[str]) -> dict[str, Any]:
        """Return what the changes would do, all together; without any, the usual ones alone."""
        path = text_of(self.folder(run))
        with self.pool.worker() as worker:
            return worker.ask(
                REQUEST_LIMIT_S,
                job="predict",
                path=path,
                stamp=run.stamp,
                settings=list(settings),
            )

    def _page(self, runs: Sequence[IndexedRun], *, job: str, **paths: str) -> Path:
        words = [__version__, _PAGES_VERSION, job, *(f"{run.id}{run.stamp}" for run in runs)]
        name = hashlib.blake2b(" ".join(words).encode(), digest_size=12).hexdigest()
        target = self.pages / f"{name}.html"
        with self.pool.worker() as worker:
            if not target.is_file():
                self.pages.mkdir(parents=True, exist_ok=True, mode=0o700)  # a cache may be cleaned
                worker.ask(REQUEST_LIMIT_S, job=job, target=text_of(target), **paths)
                for page in sorted(self.pages.glob("*.html"), key=_made_at)[:-_MOST_PAGES]:
                    page.unlink(missing_ok=True)
        return target


def _made_at(page: Path) -> float:
    try:
        return page.stat().st_mtime
    except OSError:
        return 0.0


# Where `serve` keeps files of its own: never inside run folders.
#
# What can be made again (the index, pages) is in the user's cache folder; tags, which somebody
# typed, are in the configuration folder. Both have one folder per served folder.


def cache_folder(root: Path) -> Path:
    """Return the folder for what can be made again."""
    home = user_folder("STEPSCOPE_CACHE_DIR", "", "XDG_CACHE_HOME", "~/.cache")
    return _made(home / "serve" / _name(root))


def tags_file(root: Path) -> Path:
    """$STEPSCOPE_TAGS names another folder for the files of all served folders."""
    return _made(user_folder("STEPSCOPE_TAGS", "tags")) / f"{_name(root)}.json"


def _name(root: Path) -> str:
    return hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made: {error.strerror}",
            "STEPSCOPE_CACHE_DIR and STEPSCOPE_TAGS name other folders for serve's own files",
        ) from None
    return folder


# Words that people give to runs: one JSON file per served folder, replaced as a whole.

try:
    import fcntl
except ImportError:  # not a Unix: two servers of one folder may lose each other's tags
    fcntl = None  # type: ignore[assignment]


MOST_TAGS = 20  # of one run
LONGEST_TAG = 40


class RunTags:
    """Tags by run id. Another server of the same folder may change them too."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()

    def all(self) -> dict[str, tuple[str, ...]]:
        """A damaged file is an error: tags are not made up, and not overwritten."""
        try:
            text = read_whole(self._file)
        except MissingFileError:
            return {}
        try:
            return msgspec.json.decode(text, type=dict[str, tuple[str, ...]])
        except msgspec.DecodeError:
            raise UsageError(
                f"{self._file} is damaged: repair or remove it; it holds the tags of runs"
            ) from None

    def set(self, run_id: str, tags: Iterable[str]) -> tuple[str, ...]:
        """Replace a run's tags; what is kept is returned."""
        kept = clean_tags(tags)
        with self._lock, self._locked():
            every = self.all()
            if kept:
                every[run_id] = kept
            else:
                every.pop(run_id, None)
            try:
                write_atomically(self._file, json.dumps(every, indent=0))
            except OSError as error:
                raise UsageError(f"{self._file} cannot be written: {error.strerror}") from None
        return kept

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Against other processes."""
        if fcntl is None:
            yield
            return
        try:
            descriptor = open_to_append(self._file.with_suffix(".lock"))
        except (OSError, StepscopeError) as error:
            raise UsageError(f"{self._file.parent} cannot be written: {error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def clean_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Strip tags and keep each once. UsageError for too many or too long ones."""
    words = dict.fromkeys(one_line(tag).strip() for tag in tags)
    kept = tuple(word for word in words if word)
    if len(kept) > MOST_TAGS:
        raise UsageError(f"a run takes at most {MOST_TAGS} tags")
    if long := next((word for word in kept if len(word) > LONGEST_TAG), None):
        raise UsageError(f"a tag has at most {LONGEST_TAG} characters: {long[:LONGEST_TAG]}…")
    return kept


# Child processes that do the heavy work for `serve`: one job at a time each, killed when late.

_MOST_JOBS = 200  # then a new process: memory that readers took goes back
_ERRORS = {2: UsageError, 3: UnreadableInputError, 4: NotCapturedError}


class WorkerError(StepscopeError):
    """The worker did not answer: it was killed after its limit, or has died."""


class WorkerProcess:
    """Starts its child when the first job comes, and again after a death."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None
        self._jobs = 0
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, limit_s: float, /, **job: Any) -> dict[str, Any]:
        """Return the job's result. StepscopeError if it failed, took too long or was stopped."""
        with self._lock:
            child = self._running_child()
            line = json.dumps(job).encode("ascii") + b"\n"
            try:
                text = ask_line(child, line, limit_s)
            except TimeoutError:
                self._kill()
                limit = duration(limit_s * 1e9)
                raise WorkerError(f"stopped after {limit}, the limit for one job") from None
            except (OSError, ValueError):  # a closed pipe is a ValueError
                self._kill()
                raise WorkerError(
                    "the process that reads this run was killed, perhaps because memory ran out"
                ) from None
            self._jobs += 1
            if self._jobs >= _MOST_JOBS:
                self._kill()
        return read_answer(text)

    def close(self) -> None:
        """A job that is under way ends in a WorkerError."""
        self._closed = True
        if (child := self._child) is not None:
            end_group(child)

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise WorkerError("serve is stopping")
        if self._child is None or self._child.poll() is not None:
            self._kill()
            self._child = subprocess.Popen(
                own_python("stepscope.ui.serve.worker", *self._options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that it can be ended with its own children
                bufsize=0,
            )
            self._jobs = 0
        return self._child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end_group(child)


def read_answer(text: bytes) -> dict[str, Any]:
    """Return the result in a worker's line, or its error raised."""
    answer = json.loads(text)
    if b"\\udc" in text:  # a name that is no UTF-8: pages cannot hold what stands for its bytes
        answer = json.loads(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"))
    if "error" in answer:
        raise _ERRORS.get(answer["exit_code"], StepscopeError)(answer["error"])
    return dict(answer["result"])


class WorkerPool:
    """A few workers for what people wait for; further requests wait their turn, within a limit."""

    def __init__(self, size: int, most_waiting: int) -> None:
        self._workers = [WorkerProcess() for _ in range(size)]
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._places = threading.BoundedSemaphore(size + most_waiting)

    @contextlib.contextmanager
    def worker(self) -> Iterator[WorkerProcess]:
        """Return the next free worker. WorkerError if too many wait already."""
        if not self._places.acquire(blocking=False):
            raise WorkerError("too many requests wait already: try again in a moment")
        try:
            chosen = self._idle.get()
            try:
                yield chosen
            finally:
                self._idle.put(chosen)
        finally:
            self._places.release()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


# Keeps the index up to date in the background: look for changes, summarise, then explain.

_LOOK_EVERY_S = 2.0
_REST = 10.0  # times as long as a look took, until the next one
_RUNNING_EVERY_S = 10.0  # a running run changes all the time: its row need not
SUMMARY_LIMIT_S = 30.0
EXPLAIN_LIMIT_S = 120.0


@dataclass(slots=True)
class IndexKeeper:
    """Two threads with a worker process each, of low priority for the machine's sake: traces may
    take minutes to read, and a run that has just started must not wait for them."""

    directory: RunsDirectory
    index: RunIndex
    worker: WorkerProcess = field(default_factory=lambda: WorkerProcess("--background"))
    explainer: WorkerProcess = field(default_factory=lambda: WorkerProcess("--background"))
    problem: str | None = None  # why the served folder cannot be read
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _refreshed: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self.directory.remember((run.id, run.path) for run in self.index.runs())
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name=name, daemon=True)
            for name, work in (("index", self._keep_list), ("explain", self._explain_all))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.worker.close()
        self.explainer.close()
        for thread in self._threads:
            thread.join(10)

    def look(self) -> None:
        """Bring the list of folders up to date."""
        try:
            self.index.replace_folders(self.directory.scan(), self.directory.root)
            self.problem = None
        except StepscopeError as error:
            self.problem = str(error)

    def summarise_changed(self) -> None:
        """Summarise every folder that has changed."""
        for run in self.index.unsummarised():
            if self._stop.is_set():
                return
            now, last = time.monotonic(), self._refreshed.get(run.id, float("-inf"))
            if run.state != RUNNING or now - last >= _RUNNING_EVERY_S:
                self._refreshed[run.id] = now
                self._summarise(run)

    def explain_next(self) -> bool:
        """Read the traces of one run; False if there is none to read."""
        run = self.index.next_unexplained()
        if run is None or self._stop.is_set():
            return False
        try:
            answer = self.explainer.ask(EXPLAIN_LIMIT_S, job="explain", path=text_of(run.path))
            self.index.keep_explanation(run.id, run.stamp, msgspec.convert(answer, RunSummary))
        except StepscopeError as error:
            if not self._stop.is_set():
                self.index.keep_failure(run.id, run.stamp, f"not explained: {error}")
        return True

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                work()
            except Exception as error:  # the list must go on, and say why it may be old
                self.problem = f"the list is not kept up to date: {error}"
                self._stop.wait(_LOOK_EVERY_S)

    def _keep_list(self) -> None:
        began = time.monotonic()
        self.look()
        took = time.monotonic() - began
        self.summarise_changed()
        again = began + max(_LOOK_EVERY_S, _REST * took)
        self._stop.wait(max(0.0, again - time.monotonic()))

    def _explain_all(self) -> None:
        while self.explain_next():
            pass
        self._stop.wait(_LOOK_EVERY_S)

    def _summarise(self, run: IndexedRun) -> None:
        try:
            answer = self.worker.ask(
                SUMMARY_LIMIT_S, job="summarise", path=text_of(run.path), kind=run.kind
            )
            summary = msgspec.convert(answer, RunSummary)
        except (StepscopeError, msgspec.ValidationError) as error:
            if isinstance(error, WorkerError) and self._stop.is_set():
                return
            summary = RunSummary(state=BROKEN, problem=str(error))
        try:
            self.index.keep_summary(run.id, run.stamp, summary)
        except (OverflowError, UnicodeEncodeError) as error:  # one folder must not stop the others
            broken = RunSummary(state=BROKEN, problem=f"holds a value that cannot be kept: {error}")
            self.index.keep_summary(run.id, run.stamp, broken)
