"""Backward through time in logarithmic depth.

    from stepscope.fix.scan import scan_backward

modules.py has the modules that replace torch's, rnn_layer.py and gated_layer.py their layers,
affine_maps.py the scans, also of h = a * h + b, and the *_kernels.py the same for GPUs. chain.py
scans the layers of a Sequential. advice.py says which backward pass is the fastest here, and how
far back a gradient reaches at all. remedy.py is the change scan-backward.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.fix.scan.advice import gradient_horizon as gradient_horizon
    from stepscope.fix.scan.advice import recommend as recommend
    from stepscope.fix.scan.affine_maps import linear_scan as linear_scan
    from stepscope.fix.scan.chain import scan_chain as scan_chain
    from stepscope.fix.scan.modules import ScanGRU as ScanGRU
    from stepscope.fix.scan.modules import ScanLSTM as ScanLSTM
    from stepscope.fix.scan.modules import ScanRNN as ScanRNN
    from stepscope.fix.scan.modules import scan_backward as scan_backward

_HOME = {
    "gradient_horizon": "advice",
    "recommend": "advice",
    "scan_chain": "chain",
    "linear_scan": "affine_maps",
    "ScanGRU": "modules",
    "ScanLSTM": "modules",
    "ScanRNN": "modules",
    "scan_backward": "modules",
}


def __getattr__(name: str) -> Any:
    """remedy.py is read without torch; all else loads it."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
