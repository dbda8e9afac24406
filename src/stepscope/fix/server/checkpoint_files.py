"""Checkpoints on disk: FOLDER/cut-000003/, one file for each shard, complete or not there."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UnreadableInputError
from stepscope.fix.server.shard_state import ShardSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.fix.server.layout import Layout

_KEPT = 2  # the one before stays until the new one is whole


def save_cut(
    folder: Path, cut: int, layouts: Sequence[Layout], shards: Sequence[ShardSnapshot]
) -> Path:
    """Write next to the others, then rename: a checkpoint that has its name is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"cut-{cut:06}"
    partial = folder / f".cut-{cut:06}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for shard, (layout, snapshot) in enumerate(zip(layouts, shards, strict=True)):
        torch.save(
            {
                "tensors": _names(layout),
                "flat": torch.tensor(snapshot.flat),
                "optimizer": snapshot.optimizer,
                "updates": snapshot.updates,
            },
            partial / f"shard-{shard:04}.pt",
        )
    (partial / "cut.json").write_text(json.dumps({"shards": len(shards)}), encoding="utf-8")
    shutil.rmtree(done, ignore_errors=True)
    partial.rename(done)
    for old in saved_cuts(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return done


def saved_cuts(folder: Path) -> list[Path]:
    """In order of their numbers."""
    return sorted(one for one in folder.glob("cut-*") if (one / "cut.json").is_file())


def load_cut(folder: Path, layouts: Sequence[Layout]) -> list[ShardSnapshot]:
    """The shards of one checkpoint. UnreadableInputError if it is of another model."""
    snapshots = []
    for shard, layout in enumerate(layouts):
        path = folder / f"shard-{shard:04}.pt"
        saved = _load(path)
        if saved.get("tensors") != _names(layout):
            raise UnreadableInputError(
                f"{path} was saved for another model or number of shards. Use a new "
                "checkpoint folder, or the settings that it was saved with"
            )
        snapshots.append(
            ShardSnapshot(
                flat=saved["flat"].numpy(),
                optimizer=saved["optimizer"],
                counts={},
                updates=saved["updates"],
            )
        )
    return snapshots


def _load(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UnreadableInputError(f"{path} is not a checkpoint of a shard: {error}") from None
    return saved if isinstance(saved, dict) else {}


def _names(layout: Layout) -> list[list[Any]]:
    return [[place.name, list(place.shape), str(place.dtype)] for place in layout.places]
