"""When a DataLoader creates its iterator, fetches a batch and, in a worker, makes one."""

from __future__ import annotations

import os
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.patches import when_detached, when_imported, wrap
from stepscope.measure.steps.loaders import count_elements
from stepscope.measure.steps.phases import EXHAUSTED, FETCH, FETCHED, NO_BATCH

if TYPE_CHECKING:
    from stepscope.measure.session.session import Session

# The code is flat, because calls are expensive while the processor's caches are cold (see
# phases.py).


def watch_data_loaders(session: Session) -> None:
    def attach(module: Any) -> None:
        _watch_fetches(session, module._BaseDataLoaderIter)
        _watch_iterators(session, module.DataLoader)

    when_imported("torch.utils.data.dataloader", attach)
    when_imported("torch.utils.data._utils.worker", lambda module: _watch_workers(session, module))
    when_imported("torch.utils.data._utils.fetch", lambda module: _watch_making(session, module))


def _watch_fetches(session: Session, owner: Any) -> None:
    """A loader and its iterators are known by their sampler, which they share."""
    from torch import is_grad_enabled
    from torch.compiler import is_compiling

    ends_steps = session.settings.step_on == "dataloader"
    notes, start_up, of_sampler = session.notes, session.start_up, session.loaders.of_sampler
    pace, passing = session.pace, session.pace.passing
    original = owner.__next__

    def following(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != session.thread:
            return original(self, *args, **kwargs)
        if passing.on and is_grad_enabled():
            began = perf_counter_ns()
            try:
                batch = original(self, *args, **kwargs)
            except StopIteration:
                _note_batch(session, self, began, EXHAUSTED)
                raise
            if perf_counter_ns() - began > pace.limit:
                _note_batch(session, self, began, count_elements(batch))
            pace.fetched += 1
            return batch
        session.note_from_here()
        if ends_steps:
            session.boundary()
        loader = id(getattr(self, "_index_sampler", None))
        began, used = perf_counter_ns(), thread_time_ns()
        notes.append((FETCH, began, (loader, False, is_grad_enabled())))
        if session.phases_wanted:
            session.phase_changes("data", entering=True)
        elements, batch = NO_BATCH, None
        try:
            batch = original(self, *args, **kwargs)
            elements = count_elements(batch)
            return batch
        except StopIteration:
            elements = EXHAUSTED
            raise
        finally:
            ended = perf_counter_ns()
            notes.append((FETCHED, ended, elements))
            if session.phases_wanted:
                session.phase_changes("data", entering=False)
            if start_up.waits:
                start_up.batch_arrived()
            use = of_sampler(loader)
            if use is not None and elements != NO_BATCH:
                use.passed(session.pace)
                spent = thread_time_ns() - used
                use.came(ended - began, spent, batch, elements, plain=session.is_plain)

    wrap(owner, "__next__", following)


def _note_batch(session: Session, iterator: Any, began: int, elements: int) -> None:
    """Of a step that was not noted so far: the batch took long, or there is none any more."""
    loader = id(getattr(iterator, "_index_sampler", None))
    session.note_from_here(began)
    session.notes.append((FETCH, began, (loader, False, True)))
    ended = perf_counter_ns()
    session.notes.append((FETCHED, ended, elements))
    use = session.loaders.of_sampler(loader)
    if use is not None and elements == EXHAUSTED:
        use.passed(session.pace)
        use.ended(ended - began)


def _watch_iterators(session: Session, owner: Any) -> None:
    """Creating an iterator starts the workers: the first batch waits for that."""
    from torch import is_grad_enabled
    from torch.compiler import is_compiling

    ends_steps = session.settings.step_on == "dataloader"
    notes, start_up, loaders = session.notes, session.start_up, session.loaders
    original = owner.__iter__

    def iterate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != session.thread:
            return original(self, *args, **kwargs)
        if start_up.asks:
            start_up.batch_asked_for()
            session.hang.workers.share()
        if ends_steps:
            session.boundary()
        session.note_from_here()
        loaders.begins(self)
        loader = id(getattr(self, "_index_sampler", None))
        began = perf_counter_ns()
        notes.append((FETCH, began, (loader, True, is_grad_enabled())))
        try:
            return original(self, *args, **kwargs)
        finally:
            ended = perf_counter_ns()
            notes.append((FETCHED, ended, NO_BATCH))
            loaders.created(ended - began)
            session.hang.start()  # once workers are forked: without another thread of ours

    wrap(owner, "__iter__", iterate)


def _watch_making(session: Session, module: Any) -> None:
    """In workers that were forked: batches are made there."""
    made = session.loaders.made
    owners = (
        getattr(module, name, None) for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")
    )
    fetchers = [owner for owner in owners if owner is not None]

    def forked() -> None:
        while fetchers:
            owner = fetchers.pop()
            owner.fetch = _timed(owner.fetch, made)

    os.register_at_fork(after_in_child=forked)
    when_detached(fetchers.clear)


def _watch_workers(session: Session, module: Any) -> None:
    """Workers say where they are when the rank hangs."""
    original = module._worker_loop

    def work(*args: Any, **kwargs: Any) -> Any:
        session.hang.workers.begin()
        return original(*args, **kwargs)

    wrap(module, "_worker_loop", work)


def _timed(original: Any, made: Any) -> Any:
    from torch.compiler import is_compiling

    def fetch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        began, used = perf_counter_ns(), thread_time_ns()
        batch = original(self, *args, **kwargs)
        made(perf_counter_ns() - began, thread_time_ns() - used)
        return batch

    return fetch
