"""What can be changed in a training: one file per remedy, each with one record, `FIX`.

The ids are those of records/remedies.py. A file is imported when its remedy is first asked for;
torch is imported only by `apply`.
"""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.fix.declaration import Fix

# In the order in which they are listed and tried where nothing is predicted.
_NAMES = (
    "tf32",
    "bf16",
    "fp16",
    "channels-last",
    "cudnn-benchmark",
    "compile",
    "fused-optimizer",
    "foreach-optimizer",
    "set-to-none",
    "loader-workers",
    "persistent-workers",
    "prefetch-factor",
    "pin-memory",
    "threads",
    "one-thread",
    "pin-ranks",
    "cpu-allocator",
    "flush-denormal",
    "onednn",
    "vectors",
    "expandable-segments",
    "gc-freeze",
    "no-sync",
    "sync-once",
    "bucket-view",
    "static-graph",
    "bucket-mb",
    "first-bucket-mb",
    "tuned-buckets",
    "compress-gradients",
    "no-buffer-broadcast",
    "powersgd",
    "activation-checkpointing",
    "scan-backward",
    "save-memory",
    "sdpa",
)


class _Fixes(UserDict[str, Any]):
    """Id -> declaration, read from its file on first use."""

    def __getitem__(self, name: str) -> Fix:
        if self.data[name] is None:
            file = import_module(f"{__name__}.{name.replace('-', '_')}")
            self.data[name] = file.FIX
        remedy: Fix = self.data[name]
        return remedy


FIXES = _Fixes(dict.fromkeys(_NAMES))
