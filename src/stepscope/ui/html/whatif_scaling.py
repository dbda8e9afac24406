"""Controls of workers, links and buckets: each has the positions that `whatif` can predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.scale_out import find_present_exchange
from stepscope.predict.whatifs import parse_setting
from stepscope.ui.html.whatif_axes import Axis, Option

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.predict.worker_plan import Exchange
    from stepscope.ui.html.whatif_trials import Trials

WORKERS = (1, 2, 4, 8, 16, 64, 256)
BANDWIDTHS = (0.25, 0.5, 2.0, 4.0)
BUCKETS_MB = (1, 5, 25, 100)
_NAMES = {0.25: "¼×", 0.5: "½×"}
_USUAL_MB = 25  # DDP's own bucket_cap_mb


def find_scaling_axes(trials: Trials) -> tuple[Axis, Axis, Axis, Axis]:
    """Workers, their batch, bandwidth and buckets; a control that cannot be moved says why."""
    traced = find_present_exchange(trials.bench.context)
    before = traced.ranks if traced else 1
    many = [f"workers={count}" for count in WORKERS if count != before]
    known, refusal = _try(trials, many)
    workers = _workers(before, [setting for setting in many if setting in known], refusal)
    several = [setting for setting in known if setting != "workers=1"]
    why = "" if before > 1 or several else workers.why or refusal
    # One worker has no links: they are tried with more.
    beside = [] if before > 1 else several[:1]
    return (
        workers,
        _share(trials, known, workers.why),
        _bandwidth(trials, beside, why),
        _buckets(trials, beside, why, is_traced=traced is not None),
    )


def _try(
    trials: Trials, settings: Iterable[str], beside: Sequence[str] = ()
) -> tuple[dict[str, Exchange | None], str]:
    """What each makes of the exchange, without those that refuse; and the first refusal."""
    known: dict[str, Exchange | None] = {}
    refusal = ""
    for setting in settings:
        trial = trials.make(parse_setting(each) for each in (*beside, setting))
        if trial.refused:
            refusal = refusal or trial.refused[-1].removeprefix(f"{setting}: ")
        else:
            known[setting] = trial.context.exchange
    return known, refusal


def _workers(before: int, known: Sequence[str], refusal: str) -> Axis:
    counts = sorted({before, *(int(setting.partition("=")[2]) for setting in known)})
    options = (
        Option(label=f"{count:,} (now)", setting="")
        if count == before
        else Option(label=f"{count:,}", setting=f"workers={count}")
        for count in counts
    )
    hint = "Data-parallel (DDP) workers"
    return _slider("workers", "Workers", hint, options, "" if known else refusal)


def _slider(id_: str, label: str, hint: str, options: Iterable[Option], why: str) -> Axis:
    return Axis(id=id_, label=label, hint=hint, kind="slider", options=tuple(options), why=why)


def _share(trials: Trials, known: Iterable[str], why: str) -> Axis:
    """A part of the setting of workers: workers=8:strong."""
    if not why:
        shared, refusal = _try(trials, [f"{setting}:strong" for setting in known])
        why = "" if shared else refusal
    own, shared_batch = (
        Option(label="each its own", setting=""),
        Option(label="shared", setting="strong"),
    )
    return Axis(
        id="share",
        label="Their batch",
        hint="Each worker keeps the batch (weak scaling), or they share it (strong)",
        kind="choice",
        options=(own, shared_batch),
        why=why,
    )


def _bandwidth(trials: Trials, beside: Sequence[str], why: str) -> Axis:
    known, refusal = ({}, why) if why else _try(trials, _bandwidth_settings(), beside)
    names = {f"bandwidth={factor:g}": _NAMES.get(factor, f"{factor:g}×") for factor in BANDWIDTHS}
    options = [Option(label=names[setting], setting=setting) for setting in known]
    slower = sum(setting < "bandwidth=1" for setting in known)
    options.insert(slower, Option(label="1× (now)", setting=""))
    hint = "Bytes per second between workers"
    return _slider("bandwidth", "Link bandwidth", hint, options, "" if known else refusal)


def _bandwidth_settings() -> list[str]:
    return [f"bandwidth={factor:g}" for factor in BANDWIDTHS]


def _buckets(trials: Trials, beside: Sequence[str], why: str, *, is_traced: bool) -> Axis:
    """Sizes that make the same buckets as a smaller one, or as now, are left out."""
    now_mb = 0 if is_traced else _USUAL_MB
    settings = [f"bucket-mb={size}" for size in BUCKETS_MB if size != now_mb]
    known, refusal = ({}, why) if why else _try(trials, settings, beside)
    now = trials.make(map(parse_setting, beside)).context.exchange
    made = {(now.buckets, now.comm_ns)} if now else set()
    different = []
    for setting, exchange in known.items():
        if exchange and (exchange.buckets, exchange.comm_ns) not in made:
            made.add((exchange.buckets, exchange.comm_ns))
            different.append(setting)
    sizes = sorted({now_mb, *(int(setting.partition("=")[2]) for setting in different)})
    label = "as traced (now)" if is_traced else f"{_USUAL_MB} MiB (now)"
    options = (
        Option(label=f"{size} MiB", setting=f"bucket-mb={size}")
        if size != now_mb
        else Option(label=label, setting="")
        for size in sizes
    )
    refusal = refusal or "All sizes give the same buckets"
    return _slider(
        "bucket-mb", "Bucket size", "DDP's bucket_cap_mb", options, "" if different else refusal
    )
