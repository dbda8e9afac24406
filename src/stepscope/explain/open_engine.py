"""open_engine: the engine that the command line names."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.explain.engines import Engine

EngineName = Literal["pool", "ray", "torch"]


@contextmanager
def open_engine(name: EngineName = "pool", workers: int | None = None) -> Iterator[Engine]:
    """The engine of that name, for as long as the block runs."""
    if name == "ray":
        from stepscope.explain.ray_engine import ray_cluster

        with ray_cluster(workers) as cluster:
            yield cluster
    elif name == "torch":
        from stepscope.explain.torch_engine import torch_job

        if workers is not None:
            raise UsageError(
                "--workers is for --engine pool and ray; with torch, torchrun sets how many "
                "processes there are"
            )
        with torch_job() as job:
            yield job
    else:
        from stepscope.explain.pool_engine import Pool

        yield Pool(workers)
