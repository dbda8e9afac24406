"""A plan tied to the saved tensors, autograd nodes and modules of one model, so that later passes
need only the pack hook and a few module hooks. It lives as long as the model; it is never saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stepscope.fix.saved.save_plan import KEEP

if TYPE_CHECKING:
    import torch

    from stepscope.fix.saved.encodings import Geometry
    from stepscope.fix.saved.follower import FollowedPlan
    from stepscope.fix.saved.hook_pauses import HookPauses, ModuleCall
    from stepscope.fix.saved.node_patterns import NodePattern
    from stepscope.fix.saved.replay import CallTemplate

# A node's number and which of its results; ("use", n) for what has no gradient.
SourceKey = tuple[int | str, int]


@dataclass(frozen=True, slots=True)
class SourceArgument:
    """An argument that is kept; it is taken from a saved tensor or a module's result."""

    source: SourceKey


@dataclass(frozen=True, slots=True)
class ComputedArgument:
    """An argument that another repeated call makes."""

    call: int
    slot: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class OwnedArgument:
    """A parameter; small ones are copied."""

    tensor: torch.Tensor
    copied: bool


@dataclass(frozen=True, slots=True)
class PinnedCall:
    """An operator that may be repeated; a geometry stands where the argument is another view."""

    template: CallTemplate
    arguments: tuple[SourceArgument | ComputedArgument | OwnedArgument, ...]
    geometries: tuple[Geometry | None, ...]
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueEncoding:
    """How a whole value is encoded."""

    encoding: str
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Proof:
    """The node that saved a tensor is found from a later tensor's node by following edges."""

    node: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedUse:
    """One saved tensor: where it is expected, and what happens to it."""

    nodes_before: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    action: str
    geometry: Geometry | None = None  # of a recomputed one
    computed: tuple[int, int] | None = None  # the call and its slot
    value_encoding: ValueEncoding | None = None
    outcome: str | None = None  # the encoding of what one kind of node reads
    proven_by_node: int | None = None  # encoded once this node is seen to be of the right kind
    source: SourceKey | None = None
    proofs: tuple[Proof, ...] = ()
    needs_hook: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        needed = self.action != KEEP or self.source is not None or bool(self.proofs)
        object.__setattr__(self, "needs_hook", needed)


@dataclass(frozen=True, slots=True)
class PinnedResult:
    """One tensor of a module's result that is needed."""

    place: int
    source: SourceKey | None
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, slots=True)
class PinnedPlan:
    """`patterns` and `calls` by the node's number. In `dispatched` module calls operators must be
    watched, beginning with this ordinal."""

    followed: FollowedPlan
    uses: tuple[PinnedUse, ...]
    nodes: int
    patterns: dict[int, NodePattern]
    calls: dict[int, PinnedCall]
    slots: dict[tuple[int, int], int]  # of a node's results among the call's storages
    sources: dict[SourceKey, Geometry]  # what calls start from, and how it lies in memory
    copied: frozenset[SourceKey]  # of these, those that the pass did not make
    results: dict[ModuleCall, tuple[PinnedResult, ...]]
    dispatched: dict[ModuleCall, int]
    epsilons: tuple[tuple[Any, Any], ...]  # of norm modules: not in their nodes
    lost: frozenset[int]  # operators that the plan repeats, and later passes cannot
    pauses: HookPauses

    def entered_modules(self) -> set[Any]:
        """The follower is told when they are entered."""
        return {module for module, _ in (*self.dispatched, *self.pauses.ends_at_entry)}

    def left_modules(self) -> set[Any]:
        calls = (*self.results, *self.dispatched, *self.pauses.ends_at_exit)
        return {module for module, _ in calls}

    def settings_hold(self) -> bool:
        return all(module.eps == epsilon for module, epsilon in self.epsilons)
