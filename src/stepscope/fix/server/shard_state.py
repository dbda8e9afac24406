"""One shard's parameters and optimizer: how they are built, how each message changes them,
and their checkpoints on disk.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.fix.server import messages as msg
from stepscope.fix.server.messages import Compression, Layout, unpack

# Without network and clock: the same changes in the same order give the same bits, so that a backup
# which repeats them is its primary's equal.


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecipe:
    """The settings that a shard is built from, besides its values."""

    shard: int
    layout: Layout
    optimizer: OptimizerRecipe
    compression: Compression
    synchronous: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSnapshot:
    """All that a shard knows at one moment; held gradients belong to a clock still open."""

    flat: Any  # bytes
    optimizer: dict[str, Any]
    counts: dict[str, int]
    fenced: dict[str, int] = field(default_factory=dict)
    closed: int = 0
    updates: int = 0
    held: dict[str, msg.PushGradients] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        tensors = [
            value
            for state in self.optimizer.get("state", {}).values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return int(self.flat.nbytes + sum(one.nbytes for one in tensors))


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """One optimizer step that a change caused."""

    clock: int
    members: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class _PendingCut:
    """`earlier` is the state without updates after the cut, as soon as there is one."""

    counts: dict[str, int]
    earlier: ShardState | None = None


class ShardState:
    """The rules of one shard."""

    def __init__(self, recipe: ShardRecipe, snapshot: ShardSnapshot) -> None:
        self.recipe = recipe
        self.flat = torch.tensor(snapshot.flat, dtype=torch.uint8)
        trained = {place.name: place.trained for place in recipe.layout.places}
        self._parameters = {
            name: torch.nn.Parameter(view, requires_grad=trained[name])
            for name, view in recipe.layout.views(self.flat).items()
        }
        self._optimizer, self._groups = recipe.optimizer.build(self._parameters)
        if self._optimizer is not None and snapshot.optimizer:
            self._optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))
        self.counts = dict(snapshot.counts)
        self.closed = snapshot.closed
        self.updates = snapshot.updates
        self._fenced = dict(snapshot.fenced)  # with their last counts
        self._held = dict(snapshot.held)
        self._pending: dict[int, _PendingCut] = {}
        self.cuts: dict[int, ShardSnapshot | None] = {}  # finished; None: aborted
        self.steps: list[AppliedStep] = []  # caused by the last change

    # Changes

    def change(self, message: msg.Change) -> Any:
        """Carry out one change; its answer. The caller puts the epoch in."""
        self.steps = []
        match message:
            case msg.PushGradients():
                return self._push(message)
            case msg.CloseClock():
                return self._close(message)
            case msg.Admit():
                if message.member not in self._fenced:
                    self.counts.setdefault(message.member, message.clock)
            case msg.Fence():
                return self._fence(message)
            case msg.BeginCut():
                self._begin_cut(message)
        return msg.Ack(epoch=0)

    def _push(self, message: msg.PushGradients) -> Any:
        member, clock = message.member, message.clock
        if member not in self.counts:
            return msg.Evicted()
        if clock < self.counts[member]:
            return msg.Ack(epoch=0)  # repeated
        if clock > self.counts[member]:
            return msg.OutOfOrder(
                why=f"{member} pushes clock {clock} after {self.counts[member] - 1}"
            )
        if self.recipe.synchronous:
            self._held[member] = message
        else:
            # States that a cut waits for get only the updates that belong to the cut.
            for pending in self._pending.values():
                if message.clock < pending.counts.get(message.member, 0):
                    if pending.earlier is not None:
                        pending.earlier.change(message)
                elif pending.earlier is None:
                    pending.earlier = ShardState(self.recipe, self.snapshot())
            self._apply([message], AppliedStep(message.clock, (message.member,)))
        self.counts[member] = clock + 1
        self._finish_cuts()
        return msg.Ack(epoch=0)

    def _close(self, message: msg.CloseClock) -> msg.Ack:
        if message.clock < self.closed:
            return msg.Ack(epoch=0)  # repeated
        held = {
            member: push
            for member in message.members
            if (push := self._held.get(member)) is not None and push.clock == message.clock
        }
        if held:
            self._apply(list(held.values()), AppliedStep(message.clock, tuple(held)))
        for member in held:
            del self._held[member]
        self.closed = message.clock + 1
        missing = tuple(member for member in message.members if member not in held)
        return msg.Ack(epoch=0, missing=missing)

    def _fence(self, message: msg.Fence) -> msg.Ack:
        count = self.counts.pop(message.member, message.counted)
        count = self._fenced.setdefault(message.member, count)
        held = self._held.get(message.member)
        if held is not None and held.clock >= message.counted:
            del self._held[message.member]
        for cut in [cut for cut, one in self._pending.items() if message.member in one.counts]:
            del self._pending[cut]
            self.cuts[cut] = None
        return msg.Ack(epoch=0, count=count)

    # Cuts

    @property
    def pending_cuts(self) -> set[int]:
        """Cuts that wait for updates."""
        return set(self._pending)

    def _begin_cut(self, message: msg.BeginCut) -> None:
        if message.cut in self._pending or message.cut in self.cuts:
            return
        self.cuts = {}
        if self.recipe.synchronous:
            self.cuts[message.cut] = replace(
                self.snapshot(), held={}, counts=dict.fromkeys(self.counts, self.closed)
            )
            return
        if any(self.counts.get(name, 0) > count for name, count in message.counts.items()):
            self.cuts[message.cut] = None  # a restored shard did not know that it had to wait
            return
        self._pending = {message.cut: _PendingCut(counts=message.counts)}
        self._finish_cuts()

    def _finish_cuts(self) -> None:
        for cut, pending in list(self._pending.items()):
            if all(self.counts.get(one, 0) >= count for one, count in pending.counts.items()):
                state = self if pending.earlier is None else pending.earlier
                self.cuts[cut] = state.snapshot()
                del self._pending[cut]

    def snapshot(self) -> ShardSnapshot:
        return ShardSnapshot(
            flat=self.flat.numpy().copy(),
            optimizer=copy.deepcopy(self._optimizer.state_dict()) if self._optimizer else {},
            counts=dict(self.counts),
            fenced=dict(self._fenced),
            closed=self.closed,
            updates=self.updates,
            held=dict(self._held),
        )

    # Arithmetic

    def _apply(self, pushes: Sequence[msg.PushGradients], step: AppliedStep) -> None:
        """One optimizer step with the mean of the gradients, added up in the order given."""
        totals: dict[str, Any] = {}
        for push in pushes:
            gradients = unpack(self.recipe.compression, self.recipe.layout, push.gradients)
            for name, gradient in gradients.items():
                if name not in totals:
                    totals[name] = gradient.clone() if len(pushes) > 1 else gradient
                else:
                    totals[name] += gradient
        for name, parameter in self._parameters.items():
            gradient = totals.get(name) if parameter.requires_grad else None
            if gradient is not None and len(pushes) > 1:
                gradient = gradient / len(pushes)
            parameter.grad = gradient
        if self._optimizer is not None:
            if pushes[0].settings is not None:
                set_groups(self._optimizer, self._groups, pushes[0].settings)
            self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.updates += 1
        self.steps.append(step)


# An optimizer as it can be built again, on other processes, for some of the parameters.

# They belong to the device that the worker computes on.
_WORKER_ONLY = {"capturable": False, "fused": None, "foreach": None, "differentiable": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecipe:
    """`groups` holds the settings of each parameter group, `names` the parameters in it."""

    kind: type
    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]

    def build(self, parameters: Mapping[str, Any]) -> tuple[Any, dict[int, int]]:
        """The optimizer of these parameters (None if it trains none of them), and the place of
        each group of the recipe in it."""
        groups: list[dict[str, Any]] = []
        places: dict[int, int] = {}
        for index, (settings, names) in enumerate(zip(self.groups, self.names, strict=True)):
            here = [parameters[name] for name in names if name in parameters]
            if here:
                places[index] = len(groups)
                groups.append({**settings, "params": here})
        # Optimizers check their defaults even where every group has its own.
        defaults = {"lr": groups[0]["lr"]} if groups and "lr" in groups[0] else {}
        return (self.kind(groups, **defaults), places) if groups else (None, {})


def make_recipe(
    optimizer: Any | Callable[[Sequence[Any]], Any], parameters: Mapping[str, Any]
) -> OptimizerRecipe:
    """From an optimizer of these parameters, or from a function that makes one of a list."""
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise UsageError(
                f"optimizer={optimizer!r}: give a torch optimizer of the model's parameters, or a "
                "function that makes one from a list of parameters"
            )
        optimizer = optimizer(list(trained.values()))
    by_id = {id(one): name for name, one in parameters.items()}
    names = []
    for group in optimizer.param_groups:
        unknown = [one for one in group["params"] if id(one) not in by_id]
        if unknown:
            raise UsageError(
                f"{type(optimizer).__name__} trains {len(unknown)} tensors that are not "
                "parameters of the model given to the server. Build it from that model's "
                "parameters"
            )
        names.append(tuple(by_id[id(one)] for one in group["params"]))
    settings = group_settings(optimizer)
    own = ({name: _WORKER_ONLY[name] for name in _WORKER_ONLY.keys() & group} for group in settings)
    groups = tuple({**group, **plain} for group, plain in zip(settings, own, strict=True))
    return OptimizerRecipe(kind=type(optimizer), groups=groups, names=tuple(names))


def group_settings(optimizer: Any) -> tuple[dict[str, Any], ...]:
    """The numbers of each parameter group as they are now: a schedule changes them."""
    return tuple(
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names", "initial_lr")
        }
        for group in optimizer.param_groups
    )


def set_groups(
    optimizer: Any, places: Mapping[int, int], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Use these numbers from now on."""
    for index, place in places.items():
        new = {name: value for name, value in settings[index].items() if name not in _WORKER_ONLY}
        optimizer.param_groups[place].update(new)


# Checkpoints on disk: FOLDER/cut-000003/, one file for each shard, complete or not there.

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
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            raise UnreadableInputError(f"{path} is not a checkpoint of a shard: {error}") from None
        if not isinstance(saved, dict) or saved.get("tensors") != _names(layout):
            raise UnreadableInputError(
                f"{path} was saved for another model or number of shards. Use a new "
                "checkpoint folder, or the settings that it was saved with"
            )
        flat, optimizer, updates = (saved[name] for name in ("flat", "optimizer", "updates"))
        snapshots.append(
            ShardSnapshot(flat=flat.numpy(), optimizer=optimizer, counts={}, updates=updates)
        )
    return snapshots


def _names(layout: Layout) -> list[list[Any]]:
    return [[place.name, list(place.shape), str(place.dtype)] for place in layout.places]
