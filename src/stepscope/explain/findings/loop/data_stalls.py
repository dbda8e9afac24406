"""Some steps wait for data, though a typical step does not."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    cost_lines,
    costly_stall,
    describe_loader,
    from_run,
    offer_for_waits,
    stall_severity,
    stalling_steps,
    typical_wait,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import Remedy
from stepscope.records.rank_facts import LoaderUse
from stepscope.records.run import RankRun, Stall

_MOST_WORKERS = 32  # a longer period is more likely an epoch
_SAME_LENGTH = 0.02  # of an epoch, which counts a batch more or less


def find_in(run: RankRun) -> Finding | None:
    """Waits for the data loader beyond what every step waits."""
    stall = costly_stall(run, "data")
    if stall is None:
        return None
    waits = stalling_steps(stall, run, "waits", "wait")
    return RULE.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{waits} {typical_wait(stall)} for data{_explain_period(stall, run.loader)}.",
        evidence=(*cost_lines(stall, run), *describe_loader(run.loader)),
        where=stall.where,
        remedies=_offer(stall, run.loader),
    )


def _explain_period(stall: Stall, loader: LoaderUse | None) -> str:
    """Workers start together and stay in step, so batches come in bursts of one per worker."""
    if loader is not None and loader.workers > 1 and stall.period == loader.workers:
        return f": the loader's {stall.period} workers deliver in bursts"
    if loader is not None and _is_epoch(stall, loader):
        return ": an epoch begins"
    return ""


def _is_epoch(stall: Stall, loader: LoaderUse) -> bool:
    batches = loader.epoch_batches
    if stall.period is None or batches is None:
        return False
    return abs(stall.period / batches - 1) < _SAME_LENGTH


def _offer(stall: Stall, loader: LoaderUse | None) -> tuple[Remedy, ...]:
    """Workers that start with each epoch are the first thing to change where that is the stall."""
    offers = offer_for_waits(loader, gpu=False)
    if loader is None:
        persistent = remedies.PERSISTENT_WORKERS.offer(
            "If the DataLoader has workers, set persistent_workers=True: they then outlive an epoch"
        )
        rarely = stall.period is not None and stall.period > _MOST_WORKERS
        return (persistent, *offers) if rarely else (*offers, persistent)
    if not _is_epoch(stall, loader):
        return offers
    return tuple(sorted(offers, key=lambda remedy: remedy.id != remedies.PERSISTENT_WORKERS.id))


RULE = FindingRule(id="data-stalls", title="Stalls for data", find=from_run(find_in))
