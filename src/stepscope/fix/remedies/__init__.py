"""What can be changed in a training: one file per remedy, each with one record, `FIX`.

A library's own remedy is `remedy.py` in its folder: its line here is all that the core knows of
the library. The ids are those of records/remedies.py. A file is imported when its remedy is first
asked for; torch is imported only by `apply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.fix.declaration import Fix

# Folder and id, in the order in which they are listed and tried where nothing is predicted.
_FILES = (
    "precision/tf32",
    "precision/bf16",
    "precision/fp16",
    "compute/channels-last",
    "compute/cudnn-benchmark",
    "compute/compile",
    "optimizer/fused-optimizer",
    "optimizer/foreach-optimizer",
    "optimizer/set-to-none",
    "loader/loader-workers",
    "loader/persistent-workers",
    "loader/prefetch-factor",
    "loader/pin-memory",
    "host/threads",
    "host/one-thread",
    "host/pin-ranks",
    "host/cpu-allocator",
    "host/flush-denormal",
    "host/onednn",
    "host/vectors",
    "memory/expandable-segments",
    "host/gc-freeze",
    "distributed/no-sync",
    "distributed/sync-once",
    "distributed/bucket-view",
    "distributed/static-graph",
    "distributed/bucket-mb",
    "distributed/first-bucket-mb",
    "../ddp/tuned-buckets",
    "distributed/compress-gradients",
    "distributed/no-buffer-broadcast",
    "distributed/powersgd",
    "memory/activation-checkpointing",
    "../scan/scan-backward",
    "memory/save-memory",
    "compute/sdpa",
)


class _Fixes(Mapping[str, "Fix"]):
    """Id -> declaration, read from its file when it is asked for."""

    def __init__(self, files: tuple[str, ...]) -> None:
        self._modules: dict[str, str] = {}
        for file in files:
            folder, _, name = file.rpartition("/")
            library = folder.removeprefix("../")
            self._modules[name] = (
                f"{__name__}.{folder}.{name.replace('-', '_')}"
                if library == folder
                else f"stepscope.fix.{library}.remedy"
            )

    def __getitem__(self, name: str) -> Fix:
        remedy: Fix = import_module(self._modules[name]).FIX
        return remedy

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        """Without importing the remedy's file."""
        return name in self._modules


FIXES = _Fixes(_FILES)
