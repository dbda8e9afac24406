"""The precision that a step was recorded in, as the library of operator times names it.

Under autocast an operator calls itself again with inputs in the narrow dtype. Whether fp32 products
ran as tf32 is in rank.json, else in the names of their kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.flops import DTYPES
from stepscope.predict.kernels import Family
from stepscope.records.probe_modes import mode_of
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct
from stepscope.trace.rank_facts import read_facts

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.records.trace import Trace

_NARROW = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


def traced_mode(context: StepContext) -> str:
    """Of the step as it is."""
    return mode_of(_precision(context), benchmark=_tries_algorithms(context))


def changed_mode(context: StepContext, precision: str) -> str:
    """The same step in another precision."""
    return mode_of(precision, benchmark=_tries_algorithms(context))


def may_convolve_in_tf32(context: StepContext) -> bool:
    """Whether the run let cuDNN use tf32 already; False if that is not known."""
    return bool(_switches(context).get("cudnn_tf32"))


def convolves_in_fp32(context: StepContext) -> bool:
    """Whether the run forbade cuDNN both tf32 and narrow dtypes; False if that is not known."""
    forbidden = _switches(context).get("cudnn_tf32") is False
    return forbidden and not find_autocast(context.trace)


def _tries_algorithms(context: StepContext) -> bool:
    return bool(_switches(context).get("cudnn_benchmark"))


def _switches(context: StepContext) -> dict[str, bool]:
    """torch's, as the run saw them; empty for a bare trace."""
    math = read_facts(Path(context.trace.path).parent).get("math")
    return math if isinstance(math, dict) else {}


def _precision(context: StepContext) -> str:
    narrow = find_autocast(context.trace)
    if narrow:
        return narrow
    switches = _switches(context)
    if switches.get("matmul_tf32") is not None:
        if switches["matmul_tf32"]:
            return "tf32"
        return "fp32" if switches.get("cudnn_tf32") is False else ""
    operators = context.operators
    products = operators.dtype[operators.family == Family.MATMUL]
    return "tf32" if (products == DTYPES.index("tf32")).any() else ""


def find_autocast(trace: Trace) -> str:
    """bf16 or fp16 where autocast made inputs of operators narrow, else empty."""
    host, strings = trace.host, trace.strings
    rows = np.flatnonzero(
        (host.kind == HostKind.OPERATOR) & (host.parent >= 0) & (host.dtypes >= 0)
    )
    above = host.parent[rows]
    cast = (host.name[rows] == host.name[above]) & (host.dtypes[rows] != host.dtypes[above])
    pairs = distinct(
        host.dtypes[above[cast]].astype(np.int64) * len(strings) + host.dtypes[rows[cast]]
    )
    for pair in pairs.tolist():
        wide, narrow = divmod(pair, len(strings))
        for dtype, precision in _NARROW.items():
            if wide >= 0 and dtype in strings[narrow] and '"float"' in strings[wide]:
                return precision
    return ""
