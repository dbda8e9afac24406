"""More workers and hosts, what they share, and the links between them."""

from __future__ import annotations

import re

from msgspec.structs import replace

from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    Refused,
    WrongValue,
    parse_positive,
    parse_whole,
)
from stepscope.predict.step_context import GivenLink, StepContext
from stepscope.records.prediction import PeakMemory
from stepscope.text.figures import rate, significant, size
from stepscope.text.words import plural

# workers=N: N replicas of the model, gradients summed by DDP. workers=N:strong divides the batch
# among them. hosts=N: the job on N hosts, with as many ranks on each as now; hosts=N:RATE:LATENCY
# states the link of a host.

_MAX_WORKERS = 1 << 20
_NOT_THE_LOADERS = (
    "workers are data-parallel ranks. For workers of the DataLoader write loader-workers=N"
)
_MAX_HOSTS = 1 << 17
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)\s*"
# GB/s counts bytes; Gbit/s, Gb/s and Gbps count bits.
_RATE = re.compile(rf"{_NUMBER}([kMGT]?)(?:(B)(?:/s)?|(?:bit|b)(?:/s|ps))")
_LATENCY = re.compile(rf"{_NUMBER}(ns|us|µs|ms)")
_PREFIX = {"": 1e0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6}


def predict_workers(context: StepContext, value: str) -> Outcome:
    """Refuses if the cost of an all-reduce or the sizes of the gradients are not known."""
    from stepscope.predict.scale_out import replan

    number, _, scaling = value.partition(":")
    count = parse_whole(number)
    if not 1 <= count <= _MAX_WORKERS or scaling not in ("", "strong", "weak"):
        raise WrongValue(f"workers={value}: give their number, such as 8, or 8:strong")
    alone = context.job is None and not context.trace.collectives
    hint = _NOT_THE_LOADERS if alone and context.analysis.inputs.loader else ""
    try:
        outcome = replan(context, ranks=count, strong=scaling == "strong")
    except Refused as reason:
        raise (Refused(f"{reason}. {hint}") if hint else reason) from None
    return replace(outcome, assumptions=(*outcome.assumptions, hint)) if hint else outcome


def predict_hosts(context: StepContext, value: str) -> Outcome:
    """Refuses if the link between hosts or the hosts of the ranks are not known."""
    from stepscope.predict.data_parallel import find_traced_exchange
    from stepscope.predict.planned_exchange import hosts_now
    from stepscope.predict.scale_out import replan

    count, link = parse_hosts(value)
    traced = find_traced_exchange(context, context.bare or context.graph)
    now = hosts_now(context, traced)
    if count == now.count and link is None:
        return Outcome(
            context=context, assumptions=("the number of hosts stays the same",), spread=0.0
        )
    plan = replace(now, count=count, link=link)
    return replan(context, ranks=count * now.per_host, hosts=plan)


def parse_hosts(value: str) -> tuple[int, GivenLink | None]:
    """8, 8:10GB/s or 8:10GB/s:20us."""
    number, _, rest = value.partition(":")
    speed, _, latency = rest.partition(":")
    count = parse_whole(number)
    fast, late = _RATE.fullmatch(speed.strip()), _LATENCY.fullmatch(latency.strip())
    if not 1 <= count <= _MAX_HOSTS or (rest and not fast) or (latency and not late):
        raise WrongValue(
            f"hosts={value}: give their number, such as 8. Add the rate and the latency of a "
            "host's link if needed, as in 8:10GB/s or 8:100Gbit/s:20us"
        )
    if not fast:
        return count, None
    bytes_s = float(fast[1]) * _PREFIX[fast[2]] / (1 if fast[3] else 8)
    if not bytes_s:
        raise WrongValue(f"hosts={value}: a link needs a bandwidth above 0")
    latency_ns = float(late[1]) * _NS[late[2]] if late else None
    return count, GivenLink(bytes_s=bytes_s, latency_ns=latency_ns)


def label_hosts(value: str) -> str:
    try:
        count, link = parse_hosts(value)
    except WrongValue:
        return f"hosts {value}"
    stated = f" (links of {rate(link.bytes_s, 'B/s')})" if link else ""
    return f"{count} {plural(count, 'host')}{stated}"


# zero=STAGE: workers share optimizer state (1), also gradients (2), also parameters (3).

_ZERO_DOUBT = 0.08  # of the step: implementations differ in what they gather when


def predict_zero(context: StepContext, value: str) -> Outcome:
    """Refuses one worker: it has nobody to share with."""
    from stepscope.explain.memory.model import VOLUME, bytes_per_parameter
    from stepscope.predict.scale_out import replan

    if value not in ("1", "2", "3"):
        raise WrongValue(f"zero={value}: choose stage 1, 2 or 3")
    stage = int(value)
    outcome = replan(context, stage=stage)
    exchange = outcome.context.exchange
    ranks = exchange.ranks if exchange else 1
    return replace(
        outcome,
        assumptions=(
            *outcome.assumptions,
            f"{VOLUME[stage]:g} times the bytes of plain data parallelism are sent. The "
            f"optimizer works on 1/{ranks} of the parameters",
            "with mixed-precision Adam a worker would hold "
            f"{significant(bytes_per_parameter(stage, ranks))} bytes per parameter instead of "
            f"{significant(bytes_per_parameter(0, ranks))}",
        ),
        doubt=(outcome.doubt**2 + _ZERO_DOUBT**2) ** 0.5,
        peak=_zero_peak(context, stage, ranks),
    )


def _zero_peak(context: StepContext, stage: int, ranks: int) -> PeakMemory | None:
    """The measured peak with its shared part divided; stage 3 gathers one layer at a time."""
    from stepscope.explain.memory.model import zero_bytes

    memory = context.memory
    if memory is None or memory.peak_bytes is None:
        return None
    held = {name: memory.categories.get(name) for name in ("parameters", "gradients", "optimizer")}
    if any(size is None for size in held.values()):
        return None
    whole = {name: size or 0 for name, size in held.items()}
    size = memory.peak_bytes - sum(whole.values()) + zero_bytes(stage, ranks, **whole)
    gathered = whole["parameters"] // 4 if stage == 3 else 0
    return PeakMemory(size_bytes=size, low_bytes=size, high_bytes=size + gathered)


# bucket-mb=N: DDP's bucket_cap_mb, in MiB. It sets how many gradients are summed at once.


def predict_bucket_mb(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing, unknown sizes of gradients, and a limit that leaves
    all gradients in the one bucket they are in."""
    from stepscope.predict.scale_out import find_present_exchange, replan

    limit_mb = parse_positive("bucket-mb", value, "a number of MiB, such as bucket-mb=10")
    traced = find_present_exchange(context)
    buckets = traced.buckets if traced else None
    if buckets is not None and len(buckets) == 1:
        total_bytes = int(buckets.size_bytes.sum())
        if total_bytes <= limit_mb * (1 << 20):
            raise NothingToChange(
                f"bucket-mb={value}: all gradients ({size(total_bytes)}) are in one bucket already"
            )
    return replan(context, bucket_mb=limit_mb)


# bandwidth=FACTOR and latency=FACTOR: links with so many times the bandwidth, or collectives that
# take so many times as long to start.


def predict_bandwidth(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing."""
    from stepscope.predict.scale_out import replan

    factor = parse_positive("bandwidth", value, "a factor, such as bandwidth=2")
    return replan(context, bandwidth=factor)


def predict_latency(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing."""
    from stepscope.predict.scale_out import replan

    factor = parse_positive("latency", value, "a factor, such as latency=0.5")
    return replan(context, latency=factor)
