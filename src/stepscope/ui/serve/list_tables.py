"""The list as HTML, made once for all browsers that show it: at most once a second."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.ui.serve.page_files import render
from stepscope.ui.serve.run_rows import list_context

if TYPE_CHECKING:
    from stepscope.ui.serve.run_rows import ListQuery
    from stepscope.ui.serve.served_runs import ServedRuns

_MOST_KEPT = 8
_FRESH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTable:
    """`tag` is another one whenever the list is."""

    text: str
    tag: str
    made_s: float
    generation: int
    problem: str | None


class ListTables:
    """The last few lists that were asked for."""

    def __init__(self, served: ServedRuns) -> None:
        self._served = served
        self._born = secrets.token_hex(4)  # lists of an earlier server are other lists
        self._kept: dict[ListQuery, ListTable] = {}
        self._lock = threading.Lock()

    def table(self, query: ListQuery) -> ListTable:
        """Not older than a second, if anything has changed since."""
        with self._lock:  # whoever waits gets what the first one made
            kept = self._kept.pop(query, None)
            if kept is None or not self._is_fresh(kept):
                kept = self._made(query)
            self._kept[query] = kept
            while len(self._kept) > _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            return kept

    def forget(self) -> None:
        """After somebody has changed something: they want to see it."""
        with self._lock:
            self._kept.clear()
            self._born = secrets.token_hex(4)

    def _is_fresh(self, table: ListTable) -> bool:
        if table.problem != self._served.keeper.problem:
            return False
        if table.generation == self._served.index.generation:
            return True
        return time.monotonic() - table.made_s < _FRESH_S

    def _made(self, query: ListQuery) -> ListTable:
        served = self._served
        generation, problem = served.index.generation, served.keeper.problem
        runs = served.index.runs(order=query.order, descending=query.descending)
        waiting = sum(run.kind != "none" and run.summarised is None for run in runs)
        context = list_context(runs, query, served.tags.all(), waiting)
        return ListTable(
            text=render("rows.html.j2", problem=problem, **context),
            tag=f'"{self._born}-{generation}-{abs(hash((query, problem))):x}"',
            made_s=time.monotonic(),
            generation=generation,
            problem=problem,
        )
