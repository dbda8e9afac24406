"""Columns -> where time went -> findings. Never reads a file, never prints.

`stepscope.explain(path)` calls this package: the function of that name is in ui/api.py, above all
rooms, and is looked up only then.

intervals.py         unions and differences on the time line, exact integers
work.py              what counts as the device's work, on an accelerator or on the CPU alone
timeline.py          span = compute + exposed_comm + exposed_memory + idle
idle.py              why the device waited, gap by gap
steps.py             the steps, and the steady cycle that the budget is taken over
call_tree.py         sums up and down the host's call tree
kernels.py operators.py modules.py python_functions.py launches.py copies.py syncs.py collectives.py
collective_calls.py  one rank's collectives; rank_steps.py: its steps, as ranks are compared
budget.py            the step, divided
findings/            one file per finding
rank_analysis.py     each part of a rank's analysis, computed once and shared with predictions
explain_rank.py      everything about one rank
explain_file.py      the same from a file, and a visit to it; truncate_tables.py
engines.py           where files are read: pool_engine.py, ray_engine.py, torch_engine.py
job.py               all ranks together: arrivals.py, stragglers.py, critical_path.py
strategies/          data, sharded, tensor and pipeline parallelism, one file each
together/            training through a parameter server: staleness, waiting, whether it pays
nccl/                NCCL's own logs: how the ranks are connected
explain_job.py       all files of a job; verdict.py: which finding leads
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package and a public function that share a name."""

    def __call__(self, paths: Any, **options: Any) -> Any:
        return import_module("stepscope.ui.api").explain(paths, **options)


sys.modules[__name__].__class__ = _Callable
