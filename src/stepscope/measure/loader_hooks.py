"""When a DataLoader creates its iterator, fetches a batch and, in a worker, makes one.

The code is flat, because calls are expensive while the processor's caches are cold (see steps.py).
"""

from __future__ import annotations

import functools
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.after_import import when_imported
from stepscope.measure.attached import replace
from stepscope.measure.batch_elements import count_elements
from stepscope.measure.dynamo import surrounds
from stepscope.measure.step_notes import EXHAUSTED, FETCH, FETCHED, NO_BATCH

if TYPE_CHECKING:
    from stepscope.measure.session import Session


def watch_data_loaders(session: Session) -> None:
    def attach(module: Any) -> None:
        _watch_fetches(session, module._BaseDataLoaderIter)
        _watch_iterators(session, module.DataLoader)

    when_imported("torch.utils.data.dataloader", attach)
    when_imported("torch.utils.data._utils.fetch", lambda module: _watch_making(session, module))


def _watch_fetches(session: Session, owner: Any) -> None:
    """A loader and its iterators are known by their sampler, which they share."""
    from torch import is_grad_enabled
    from torch.compiler import is_compiling

    ends_steps = session.settings.step_on == "dataloader"
    notes, start_up, of_sampler = session.notes, session.start_up, session.loaders.of_sampler
    original = owner.__next__

    @surrounds
    @functools.wraps(original)
    def following(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != session.thread:
            return original(self, *args, **kwargs)
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
            if use is not None and elements == EXHAUSTED:
                use.ended(ended - began)
            elif use is not None and elements != NO_BATCH:
                spent = thread_time_ns() - used
                use.fetched(ended - began, spent, batch, plain=session.is_plain)

    replace(owner, "__next__", following)


def _watch_iterators(session: Session, owner: Any) -> None:
    """Creating an iterator starts the workers: the first batch waits for that."""
    from torch import is_grad_enabled
    from torch.compiler import is_compiling

    ends_steps = session.settings.step_on == "dataloader"
    notes, start_up, loaders = session.notes, session.start_up, session.loaders
    original = owner.__iter__

    @surrounds
    @functools.wraps(original)
    def iterate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != session.thread:
            return original(self, *args, **kwargs)
        if start_up.asks:
            start_up.batch_asked_for()
        if ends_steps:
            session.boundary()
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

    replace(owner, "__iter__", iterate)


def _watch_making(session: Session, module: Any) -> None:
    """In workers that were forked: batches are made there."""
    made = session.loaders.made
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        owner = getattr(module, name, None)
        if owner is not None:
            replace(owner, "fetch", _timed(owner.fetch, made))


def _timed(original: Any, made: Any) -> Any:
    from torch.compiler import is_compiling

    @surrounds
    @functools.wraps(original)
    def fetch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        began, used = perf_counter_ns(), thread_time_ns()
        batch = original(self, *args, **kwargs)
        made(perf_counter_ns() - began, thread_time_ns() - used)
        return batch

    return fetch
