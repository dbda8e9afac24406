"""Raw times of ranks that cost exactly what a model says: alpha, beta, gamma, no noise."""

from __future__ import annotations

from typing import Any

from stepscope.records.collective_schedules import (
    ALGORITHMS,
    COLLECTIVES,
    build_probes,
    square_groups,
)

ALPHA, BETA, GAMMA, MESSAGE, START = 1e6, 80.0, 2.0, 1e4, 5e5
SIZES = [1 << power for power in range(12, 23, 2)]


def made_raw(ranks: int, *, kinds: tuple[str, ...] = COLLECTIVES) -> dict[str, Any]:
    """What four passes would have measured; the algorithms follow the formulas by hand."""
    hosts = [list(range(ranks))]
    probes = [
        {
            "kind": kind,
            "name": probe.name,
            "steps": probe.steps,
            "sizes_bytes": SIZES,
            "passes_ns": [[[_probe_ns(probe.name, probe.steps, size, ranks)] for size in SIZES]]
            * 4,
        }
        for kind in kinds
        for probe in build_probes(ranks, hosts)
    ]
    return {
        "host": "made", "device": "made", "kind": "cpu", "torch": "2.13", "when_unix": 1e9,
        "backend": "gloo", "world_size": ranks, "checked": 21, "hosts": hosts,
        "groups": square_groups(ranks), "probes": probes,
        "algorithms": [
            {
                "kind": kind, "algorithm": name, "sizes_bytes": SIZES,
                "passes_ns": [[[_algorithm_ns(name, kind, size, ranks)] for size in SIZES]] * 4,
            }
            for kind in kinds
            for name in [*ALGORITHMS, "gloo"]
        ],
    }  # fmt: skip


def _probe_ns(name: str, steps: int, size: int, ranks: int) -> float:
    if name == "fan":  # only small messages
        return START + steps * (ALPHA + min(size, 4096) * BETA + (ranks - 2) * MESSAGE)
    added = GAMMA * size if name == "add" else 0.0
    return START + steps * (ALPHA + BETA * size + added)


def _algorithm_ns(name: str, kind: str, size: int, ranks: int) -> float:
    """Four ranks, worked out by hand: steps, vectors sent, vectors added, further messages."""
    assert ranks == 4
    steps, sent, added, further = {
        ("ring", "all_reduce"): (6, 1.5, 0.75, 0),
        ("binomial_tree", "all_reduce"): (4, 4.0, 2.0, 0),
        ("halving_doubling", "all_reduce"): (4, 1.5, 0.75, 0),
        ("recursive_doubling", "all_reduce"): (2, 2.0, 2.0, 0),
        ("bruck", "all_reduce"): (4, 1.5, 0.75, 0),
        ("direct", "all_reduce"): (2, 1.5, 0.75, 4),
        ("hierarchical", "all_reduce"): (4, 1.5, 0.75, 0),
        ("gloo", "all_reduce"): (6, 1.5, 0.75, 0),
    }.get((name, kind), (3, 0.75, 0, 0))
    return START + steps * ALPHA + size * (sent * BETA + added * GAMMA) + further * MESSAGE
