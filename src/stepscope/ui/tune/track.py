"""Promises of single remedies meet their trials: the track record learns from every tune."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.verify.answered_promise import deliver, examine
from stepscope.verify.compare import compare
from stepscope.verify.track_record import open_promises

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.ui.tune.contenders import Contender
    from stepscope.ui.tune.journal import TunePlan
    from stepscope.ui.tune.search import Search


def answer_promises(plan: TunePlan, search: Search, trials: Path) -> None:
    """What cannot be answered stays open; the record is never a reason to fail."""
    wanted = {row.promise for row in plan.candidates if row.promise}
    with contextlib.suppress(StepscopeError):
        promises = {promise.id: promise for promise in open_promises() if promise.id in wanted}
        for contender in search.contenders:
            promise = promises.get(contender.planned.promise or "")
            if promise is None or contender.alone is None or not contender.alone.counts:
                continue
            if contender.alone.unapplied:
                continue
            comparison = compare(
                [str(trials / trial.folder) for trial in search.bases],
                [str(trials / folder) for folder in search.folders_of((contender.name,))],
                explain=False,
            )
            seen, why = examine(promise, comparison, named=True)
            if why is None:
                deliver(promise, comparison, (*seen, _deed(contender)), named=True)


def _deed(contender: Contender) -> str:
    assert contender.alone is not None
    return f"tune applied {contender.name}: {contender.alone.deeds.get(contender.name, '')}"
