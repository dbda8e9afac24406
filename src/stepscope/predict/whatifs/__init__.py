"""What could be changed, one file a what-if; a what-if's name is its file's.

Each file has `HELP` and `apply(scene, value) -> Outcome`, which raises Refused where there is
nothing to change or the trace does not tell enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.whatifs import (
    accumulate,
    bandwidth,
    batch,
    bucket_mb,
    checkpoint,
    cuda_graphs,
    latency,
    no_data_wait,
    no_straggler,
    no_sync,
    optimizer,
    precision,
    remove,
    scale,
    workers,
    zero,
)
from stepscope.predict.whatifs import compile as compile_

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.predict.scene import Scene
    from stepscope.predict.whatifs.outcome import Outcome

    Apply = Callable[[Scene, str], Outcome]

_ALL = (
    precision,
    optimizer,
    cuda_graphs,
    compile_,
    batch,
    accumulate,
    checkpoint,
    no_sync,
    no_data_wait,
    remove,
    scale,
    workers,
    zero,
    bucket_mb,
    bandwidth,
    latency,
    no_straggler,
)


def _name(module: object) -> str:
    return getattr(module, "__name__", "").rpartition(".")[2].replace("_", "-")


WHATIFS: dict[str, Apply] = {_name(module): module.apply for module in _ALL}
HELP: dict[str, str] = {_name(module): module.HELP for module in _ALL}
