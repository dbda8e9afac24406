"""Collectives on another GPU's links: a start, and bytes at a share of the link's rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.other_gpu.fitted import transfer_fit

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Floats
    from stepscope.predict.other_gpu.gpu import Gpu
    from stepscope.predict.step_context import StepContext


def collective_ratio(context: StepContext, source: Gpu, target: Gpu) -> Floats:
    """Times of the step's collectives on the target's links, over those on the source's.

    What a collective takes beyond its start is bytes, and those go by the links' rates. Waiting for
    other ranks is in it too: the others get the same GPU.
    """
    ranks = max(2, context.trace.world_size or 2)
    tasks = context.graph.tasks
    measured_ns = np.maximum(tasks.dur_ns, 1.0)
    start = np.minimum(measured_ns, start_ns(source))
    bytes_ns = measured_ns - start
    faster = link_bytes_s(source, ranks) / link_bytes_s(target, ranks)
    then = np.minimum(start, start_ns(target)) + bytes_ns * faster
    ratio: Floats = then / measured_ns
    return ratio


def link_bytes_s(gpu: Gpu, ranks: int) -> float:
    """What an all-reduce inside a machine gets of the link, in one direction."""
    shares = _link(gpu)
    sizes = sorted(int(size) for size in shares if size.isdigit())
    nearest = max((size for size in sizes if size <= ranks), default=sizes[0])
    return shares[str(nearest)] * gpu.link_bytes_s / 2


def start_ns(gpu: Gpu) -> float:
    return 1e3 * _link(gpu)["start_us"]


def _link(gpu: Gpu) -> dict[str, float]:
    links = transfer_fit().link
    return links.get(gpu.row.link.split()[0] if gpu.row.link else "PCIe", links["PCIe"])
