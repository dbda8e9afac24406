"""Compare all-reduce algorithms (ring, tree, halving-doubling) by their textbook formulas:
which is fastest at each size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import msgspec

from stepscope.errors import UsageError
from stepscope.records.hardware import Segment

# Which all-reduce algorithm is fastest: ring, tree or halving-doubling, by their alpha-beta costs.
#
# With p ranks, n bytes, alpha per hop and beta per byte of one link (docs/records/collectives.md):
#
#     ring              2 (p-1) alpha      +  2 (p-1)/p n beta
#     tree              2 log2(p) alpha    +  2 n beta             (pipelined)
#     halving-doubling  2 log2(p) alpha    +  2 (p-1)/p n beta
#
# Reduce-scatter and all-gather are each half of the ring's. collective_laboratory.py has every
# algorithm that can be measured; the pipelined tree is NCCL's, and only compared.
#
# Over h hosts with r ranks on each, p = r h, and hops inside a host and between hosts:
#
#     ring          2 (p-1) max(alpha)  +  2 (p-1)/p n max(beta)
#     hierarchical  2 (r-1) alpha_in + 2 (r-1)/r n beta_in
#                   + 2 (h-1) alpha_out + 2 (h-1)/h n beta_out
#
# A ring is as slow as its slowest hop. A hierarchical all-reduce scatters inside the host, reduces
# between hosts (all r ranks at once, over the host's one link) and gathers inside the host.

ALGORITHMS = ("ring", "tree", "halving_doubling")
_TIE = 1e-9


class Crossover(msgspec.Struct, frozen=True, kw_only=True):
    """`below` is faster up to this size, `above` beyond it."""

    below: str
    above: str
    size_bytes: float


class AlgorithmComparison(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    ranks: int
    alpha_ns: float
    beta_ns_per_byte: float
    times_ns: dict[str, float]
    fastest: tuple[str, ...]  # several if they tie
    crossovers: tuple[Crossover, ...]
    reduce_scatter_ns: float
    all_gather_ns: float


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One message between neighbours: alpha + beta x bytes."""

    alpha_ns: float
    beta_ns_per_byte: float


def compare_algorithms(
    size_bytes: int, ranks: int, alpha_ns: float, beta_ns_per_byte: float
) -> AlgorithmComparison:
    """Each algorithm's time, the fastest, and the sizes at which two of them trade places."""
    if ranks < 2:
        raise UsageError(f"a collective needs at least 2 ranks, not {ranks}")
    if size_bytes < 0 or alpha_ns < 0 or beta_ns_per_byte < 0:
        raise UsageError("sizes, alpha and beta cannot be negative")
    times = {
        name: hops * alpha_ns + volume * size_bytes * beta_ns_per_byte
        for name, (hops, volume) in _hops_and_volumes(ranks).items()
    }
    least = min(times.values())
    return AlgorithmComparison(
        size_bytes=size_bytes,
        ranks=ranks,
        alpha_ns=alpha_ns,
        beta_ns_per_byte=beta_ns_per_byte,
        times_ns=times,
        fastest=tuple(name for name, ns in times.items() if ns <= least * (1 + _TIE)),
        crossovers=_crossovers(ranks, alpha_ns, beta_ns_per_byte),
        reduce_scatter_ns=times["ring"] / 2,
        all_gather_ns=times["ring"] / 2,
    )


def hop_of_line(segments: Sequence[Segment], ranks: int) -> Hop:
    """alpha and beta of one hop, if these lines are a ring's over so many ranks.

    The latency is the first segment's, the rate the last one's.
    """
    hops, volume = _hops_and_volumes(ranks)["ring"]
    return Hop(
        alpha_ns=segments[0].alpha_ns / hops,
        beta_ns_per_byte=segments[-1].beta_ns_per_byte / volume,
    )


def ring_over_hosts(
    hosts: int, per_host: int, inside: Hop | None, between: Hop, *, tree_latency: bool = False
) -> Segment:
    """An all-reduce over all ranks in one ring, which the slowest hop decides.

    Hops inside a host that are not known are taken to be no slower than those between hosts. With
    `tree_latency` a message climbs a tree inside the host and one between the hosts, as small
    messages do under NCCL.
    """
    ranks = hosts * per_host
    hops, volume = _hops_and_volumes(ranks)["ring"]
    slow = [between, *([inside] if inside and per_host > 1 else [])]
    alpha = hops * max(hop.alpha_ns for hop in slow)
    if tree_latency:
        near = inside.alpha_ns if inside else between.alpha_ns
        alpha = 2 * (math.log2(per_host) * near + math.log2(hosts) * between.alpha_ns)
    return _all_sizes(alpha, volume * max(hop.beta_ns_per_byte for hop in slow))


def hierarchical_over_hosts(hosts: int, per_host: int, inside: Hop, between: Hop) -> Segment:
    """An all-reduce in three parts: inside hosts, between them, inside them again."""
    parts = [(per_host, inside), (hosts, between)]
    rings = [(*_hops_and_volumes(ranks)["ring"], hop) for ranks, hop in parts if ranks > 1]
    return _all_sizes(
        sum(hops * hop.alpha_ns for hops, _, hop in rings),
        sum(volume * hop.beta_ns_per_byte for _, volume, hop in rings),
    )


def _all_sizes(alpha_ns: float, beta_ns_per_byte: float) -> Segment:
    return Segment(
        from_bytes=0, to_bytes=1 << 40, alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte
    )


def _hops_and_volumes(ranks: int) -> dict[str, tuple[float, float]]:
    """Alphas, and multiples of all bytes, that each algorithm costs."""
    levels, volume = 2 * math.log2(ranks), 2 * ((ranks - 1) / ranks)
    return {
        "ring": (2.0 * (ranks - 1), volume),
        "tree": (levels, 2.0),
        "halving_doubling": (levels, volume),
    }


def _crossovers(ranks: int, alpha_ns: float, beta_ns_per_byte: float) -> tuple[Crossover, ...]:
    """Sizes at which fewer hops stop making up for more bytes; smallest first."""
    terms = _hops_and_volumes(ranks)
    crossovers = []
    for one, other in combinations(ALGORITHMS, 2):
        below, above = sorted((one, other), key=lambda name: terms[name][0])
        hops = (terms[above][0] - terms[below][0]) * alpha_ns
        volume = (terms[below][1] - terms[above][1]) * beta_ns_per_byte
        if hops > 0 and volume > 0:
            crossovers.append(Crossover(below=below, above=above, size_bytes=hops / volume))
    return tuple(sorted(crossovers, key=lambda crossover: crossover.size_bytes))
