"""What the findings about data offer, from what capture read of the DataLoader."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from stepscope.records import remedies
from stepscope.records.figures import duration
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.records.explanation import Remedy
    from stepscope.records.loader_use import CodePlace, LoaderUse

_LEAST_GAIN = 0.1  # of fetching: less of it is collating by a function of the script


def describe_loader(loader: LoaderUse | None) -> tuple[str, ...]:
    """A line of evidence: the loader's settings and what a batch costs."""
    if loader is None:
        return ()
    workers = counted(loader.workers, "worker") if loader.workers else "no workers"
    words = [f"the DataLoader has {workers}" + (" that persist" if loader.persistent else "")]
    if loader.dataset:
        iterable = " (IterableDataset)" if loader.iterable else ""
        words.append(f"{loader.dataset}{iterable}")
    made_ns = make_ns(loader)
    if made_ns is not None:
        words.append(f"a batch takes {duration(made_ns)} to make")
    return (", ".join(words),)


def make_ns(loader: LoaderUse) -> float | None:
    """To make one batch, in the process that makes it; None if too few were counted."""
    if not loader.workers:
        return loader.fetch.mean_ns()
    return loader.make.mean_ns() if loader.make else None


def offer_for_waits(loader: LoaderUse | None, *, gpu: bool) -> tuple[Remedy, ...]:
    """What may shorten waits for data. How many workers help is predicted, so no remedy here
    promises that more do."""
    if loader is None:
        unknown = remedies.NO_DATA_WAIT.offer(
            "Try more DataLoader workers (num_workers=4, persistent_workers=True). How the data is "
            "loaded was not captured"
        )
        return (unknown, remedies.PIN_MEMORY.offer()) if gpu else (unknown,)
    return (
        remedies.LOADER_WORKERS.offer(_workers_words(loader)),
        remedies.CHEAPER_BATCH.offer(_cheaper_words(loader)),
        *_for_workers(loader),
        *([remedies.PIN_MEMORY.offer()] if gpu and not loader.pinned else []),
    )


def _workers_words(loader: LoaderUse) -> str:
    words = f"Try another num_workers in the DataLoader (it has {loader.workers})"
    if loader.iterable:
        words += ". Its dataset only yields: each worker must take its share"
    return words


def _cheaper_words(loader: LoaderUse) -> str:
    """Names the line that makes an item, or the one that collates a batch."""
    places = [place for place in (loader.made_at, loader.collated_at) if place is not None]
    if not places:
        return remedies.CHEAPER_BATCH.action
    made_ns = make_ns(loader)
    takes = f" (it takes {duration(made_ns)})" if made_ns is not None else ""
    return f"Make a batch cheaper{takes}, in {' and '.join(map(_words, places))}"


def _words(place: CodePlace) -> str:
    return f"{PurePath(place.file).name}:{place.line} ({place.function})"


def _for_workers(loader: LoaderUse) -> list[Remedy]:
    """Only where there are workers, and a second epoch began."""
    if not loader.workers or loader.persistent or loader.epochs < 2:
        return []
    return [remedies.PERSISTENT_WORKERS.offer()]
