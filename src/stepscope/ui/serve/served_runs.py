"""Everything that the pages are made from: folders, index, tags, workers and kept pages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope import __version__
from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.ui.serve.index_files import cache_folder, tags_file
from stepscope.ui.serve.index_keeper import IndexKeeper
from stepscope.ui.serve.path_text import text_of
from stepscope.ui.serve.run_index import RunIndex
from stepscope.ui.serve.run_tags import RunTags
from stepscope.ui.serve.runs_directory import RunsDirectory
from stepscope.ui.serve.worker_process import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.ui.serve.run_index import IndexedRun

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
        """Where it is now. GoneError if it was removed, NotCapturedError if it is no run."""
        if run.kind == "none":
            raise NotCapturedError(f"{run.name} {run.problem}")
        folder = self.directory.folder_of(run.id)
        if folder is None:
            raise GoneError(f"the run {run.name} has been removed, or cannot be read any more")
        return folder

    def report(self, run: IndexedRun) -> Path:
        """The file with the run's report, made if the run has changed since the last time."""
        return self._page([run], job="report", path=text_of(self.folder(run)))

    def comparison(self, a: IndexedRun, b: IndexedRun) -> Path:
        a_path, b_path = text_of(self.folder(a)), text_of(self.folder(b))
        return self._page([a, b], job="compare", a=a_path, b=b_path)

    def predictions(self, run: IndexedRun, settings: Sequence[str]) -> dict[str, Any]:
        """What the changes would do, all together; without any, the usual ones alone."""
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
                self._forget_old_pages()
        return target

    def _forget_old_pages(self) -> None:
        made = sorted(self.pages.glob("*.html"), key=_made_at, reverse=True)
        for page in made[_MOST_PAGES:]:
            page.unlink(missing_ok=True)


def _made_at(page: Path) -> float:
    try:
        return page.stat().st_mtime
    except OSError:
        return 0.0
