"""Decide how each saved tensor of a plan is recognised in later passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.operators import plain_name
from stepscope.fix.saved.pinned_plan import (
    NEEDS_EPSILON,
    NUMBER_OPERANDS,
    VIEW_NODES,
    ComputedArgument,
    NodePattern,
    OwnedArgument,
    PinnedCall,
    PinnedPlan,
    PinnedResult,
    PinnedUse,
    PinningFollower,
    Proof,
    SeenCall,
    SeenResult,
    SeenTensor,
    SeenUse,
    SourceArgument,
    SourceKey,
    ValueEncoding,
    all_nodes,
    number_in,
    settled_node,
)
from stepscope.fix.saved.plan_load import HookPauses, ModuleCall, plan_pauses
from stepscope.fix.saved.replay import (
    ArgumentPlace,
    CallResult,
    EncodedTensor,
    KeptTensor,
)
from stepscope.fix.saved.save_plan import ENCODE, KEEP, RECOMPUTE

# A call is settled by its node where the node tells everything about it, and every input is a
# parameter, made by another settled call, or seen by the pack hook or as a module's result. The
# other calls stay watched: their modules are named, and only there operators pass through Python.

_NEGLIGIBLE = 0.001  # of all saved bytes, where these are not few
_FEW_BYTES = 1 << 20
_FURTHEST = 40  # saved tensors after the one that waits for its proof
Argument = ComputedArgument | OwnedArgument | SourceArgument


def pin_plan(seen: PinningFollower, *, pausing: bool = True) -> PinnedPlan:
    """What cannot be recognised is kept; `lost` names it. With `pausing`, the pack hook rests where
    all is kept."""
    plan = _Pinning(seen).plan()
    if not pausing:
        return plan
    needed = {number for number, use in enumerate(plan.uses) if use.needs_hook}
    # Without the hook, autograd calls operators of its own where it saves a result: where
    # operators are counted, the hook stays.
    entered = {one.call: one.place.uses for one in seen.boundaries if one.entering}
    left = {one.call: one.place.uses for one in seen.boundaries if not one.entering}
    inside: set[int] = set()
    for call in plan.dispatched:
        if call in entered and call in left:
            inside.update(range(entered[call], left[call]))
    needed |= inside
    offloading = plan.followed.left_at | plan.followed.fetch_at
    needed |= offloading & set(range(len(plan.uses)))
    return replace(plan, pauses=plan_pauses(sorted(needed), seen.boundaries))


class _SettledCalls:
    """Calls that nodes tell all about, and where their inputs come from."""

    def __init__(self, seen_pass: SeenPass) -> None:
        self._pass = seen_pass
        self.calls: dict[int, PinnedCall] = {}
        self.node_of: dict[int, int] = {}  # by id of the call
        self.slots: dict[tuple[int, int], int] = {}
        self.use_sources: dict[int, SourceKey] = {}
        self.sources: dict[SourceKey, Geometry] = {}
        self.copied: set[SourceKey] = set()
        self.results: dict[tuple[ModuleCall, int], SourceKey] = {}
        self.nodes: set[int] = set()
        self.with_numbers: dict[int, NodePattern] = {}
        self.epsilons: list[tuple[Any, Any]] = []

    def add(self, call: SeenCall) -> None:
        """Raises NotSettledError."""
        node, pattern = call.node, self._pass.pattern(call.node)
        settled = settled_node(call.call.template.operator)
        if node is None or pattern is None or settled is None or pattern.name != settled:
            raise NotSettledError("no node")
        epsilon = self._epsilon(call)
        found: list[tuple[Argument, Geometry | None, int | SeenResult | None]] = []
        numbers = tuple(self._numbers(call, node))
        for tensor, held in zip(call.tensors, call.call.inputs, strict=True):
            found.append(self._argument(tensor, held, node))
        used = {one.call for one, _, _ in found if isinstance(one, ComputedArgument)}
        self.calls[node] = PinnedCall(
            call.call.template,
            tuple(argument for argument, _, _ in found),
            tuple(geometry for _, geometry, _ in found),
            call.call.places,
            call.call.sizes,
            tuple(sorted(used)),
        )
        self.node_of[id(call.call)] = node
        self.nodes |= {node, *self._views_before(pattern)}
        self.epsilons += epsilon
        if numbers:
            self.with_numbers[node] = replace(pattern, numbers=numbers)
        for argument, _, seen_as in found:
            if isinstance(argument, SourceArgument):
                self._see(argument.source, seen_as)

    def note_inputs(self, call: SeenCall) -> None:
        """Of a watched call: what settled ones make for it."""
        for tensor, held in zip(call.tensors, call.call.inputs, strict=True):
            if not isinstance(held, CallResult) or tensor.maker is None:
                continue
            if self.node_of.get(id(held.call)) == tensor.maker[0]:
                self.slots[tensor.maker] = held.slot

    def _see(self, key: SourceKey, seen_as: int | SeenResult | None) -> None:
        if isinstance(seen_as, int):
            self.use_sources[seen_as] = key
        elif seen_as is not None:
            self.results[seen_as.module, seen_as.place] = key

    def _argument(
        self, tensor: SeenTensor, held: Any, node: int
    ) -> tuple[Argument, Geometry | None, int | SeenResult | None]:
        """What the argument is had from, how it lies there, and where that is seen."""
        is_copy = isinstance(held, KeptTensor) and not tensor.lies_in(held.tensor)
        if tensor.parameter is not None and tensor.parameter.requires_grad:
            if not isinstance(tensor.parameter, torch.nn.Parameter):
                raise NotSettledError("an input of the model")
            same = Geometry.of(tensor.parameter) == tensor.geometry
            if is_copy and not same and tensor.parameter.storage_offset():
                raise NotSettledError("a part of a weight that lies in the middle of others")
            owned = OwnedArgument(tensor.parameter, is_copy)
            return owned, None if same else tensor.geometry, None
        made = self.node_of.get(id(held.call)) if isinstance(held, CallResult) else None
        if made is not None:
            if tensor.maker is None or tensor.maker[0] != made:
                raise NotSettledError("a result without gradient")
            self.slots[tensor.maker] = held.slot
            return ComputedArgument(made, held.slot, tensor.geometry), None, None
        key, seen_as, geometry = self._pass.source(tensor, node)
        self.sources[key] = geometry
        same = geometry == tensor.geometry
        if is_copy:
            if not same:
                raise NotSettledError("a part of what the pass did not make")
            self.copied.add(key)
        return SourceArgument(key), None if same else tensor.geometry, seen_as

    def _numbers(self, call: SeenCall, node: int) -> Iterator[tuple[str, float]]:
        """Operands that are numbers; products keep them in their node, sums do not."""
        template = call.call.template
        if template.operator._overloadname != "Tensor":
            return
        for field, argument in zip(("_saved_self", "_saved_other"), template.args, strict=False):
            if isinstance(argument, ArgumentPlace):
                continue
            number = None
            if plain_name(template.operator).rstrip("_") in NUMBER_OPERANDS:
                number = number_in(self._pass.nodes[node], field)
            if number is None or number != argument:
                raise NotSettledError("a number that its node does not keep")
            yield field, number

    def _epsilon(self, call: SeenCall) -> list[tuple[Any, Any]]:
        if plain_name(call.call.template.operator) not in NEEDS_EPSILON:
            return []
        module = call.modules[-1][0] if call.modules else None
        if not type(module).__module__.startswith("torch.nn.") or not hasattr(module, "eps"):
            raise NotSettledError("its epsilon is not a module's")
        if module is None or module.eps != call.epsilon:
            raise NotSettledError("its epsilon is not the module's")
        return [(module, module.eps)]

    def _views_before(self, pattern: NodePattern) -> Iterator[int]:
        waiting = [edge.made for edge in pattern.edges]
        while waiting:
            number = waiting.pop()
            before = self._pass.pattern(number)
            if number is not None and before is not None and before.name in VIEW_NODES:
                yield number
                waiting.extend(edge.made for edge in before.edges)


class _Pinning:
    def __init__(self, seen: PinningFollower) -> None:
        self._pass = SeenPass(seen)
        self._seen = seen
        self._watched: set[ModuleCall] = set()
        self._lost: set[int] = set()
        self._settled = _SettledCalls(self._pass)
        self._proofs_of_uses = defaultdict[int, list[Proof]](list)
        self._proofs_of_results: defaultdict[Any, list[Proof]] = defaultdict(list)
        self._proven: set[int] = set()
        # Recomputed tensors that are not worth the host's time, such as the statistics of norms:
        # the smallest ones, all together at most a small share of what is saved.
        sizes = sorted(
            (use.tensor.geometry.size_bytes, number)
            for number, use in enumerate(seen.uses)
            if isinstance(use.held, CallResult)
        )
        saved_bytes = seen.followed.plan.saved_bytes_before
        left_bytes = saved_bytes * _NEGLIGIBLE if saved_bytes >= _FEW_BYTES else 0
        negligible: set[int] = set()
        for size_bytes, number in sizes:
            left_bytes -= size_bytes
            if left_bytes < 0:
                break
            negligible.add(number)
        self._negligible = negligible
        self._call_of = {id(call.call): call for call in seen.calls}

    def plan(self) -> PinnedPlan:
        chosen = [
            use.held.call
            for number, use in enumerate(self._seen.uses)
            if isinstance(use.held, CallResult) and number not in self._negligible
        ]
        waiting, met = list(chosen), dict[int, Any]()
        while waiting:
            call = waiting.pop()
            if id(call) not in met:
                met[id(call)] = call
                waiting.extend(call.parents)
        self._settle(set(met))
        uses = [self._use(number, use) for number, use in enumerate(self._seen.uses)]
        return self._assembled(uses)

    # calls

    def _settle(self, needed: set[int]) -> None:
        """Watching a module may take away what calls outside it start from: until nothing new."""
        while True:
            self._settled = _SettledCalls(self._pass)
            self._lost.clear()
            watched = set(self._watched)
            for call in self._seen.calls:
                if id(call.call) not in needed or self._is_watched(call):
                    continue
                try:
                    self._settled.add(call)
                except NotSettledError:
                    self._watched.update(call.modules[-1:])
                    if not call.modules:
                        self._lost.add(call.ordinal)
            if watched == self._watched:
                break
        for call in self._seen.calls:
            if self._is_watched(call):
                self._settled.note_inputs(call)

    def _is_watched(self, call: SeenCall) -> bool:
        return any(module in self._watched for module in call.modules)

    # saved tensors

    def _use(self, number: int, seen: SeenUse) -> PinnedUse:
        planned = self._seen.followed.plan.uses[number]
        kept = PinnedUse(
            nodes_before=seen.nodes_before,
            shape=seen.tensor.geometry.shape if planned.shape is None else planned.shape,
            dtype=getattr(torch, planned.dtype),
            action=KEEP,
            source=self._settled.use_sources.get(number),
        )
        if number in self._negligible:
            return kept
        if isinstance(seen.held, CallResult):
            return self._recomputed_use(number, seen, seen.held, kept)
        if planned.action == ENCODE and isinstance(seen.held, EncodedTensor):
            known = self._seen.value_encodings.get(seen.tensor.content)
            whole = seen.held.geometry is not None
            encoded = replace(
                kept,
                action=ENCODE,
                value_encoding=ValueEncoding(*known) if whole and known is not None else None,
                outcome=None if whole else planned.encoding,
            )
            self_evident = whole and not (planned.encoding or "").startswith("window ")
            return encoded if self_evident else self._proven_use(number, seen, encoded) or kept
        return (
            kept if planned.action in (ENCODE, RECOMPUTE) else replace(kept, action=planned.action)
        )

    def _recomputed_use(
        self, number: int, seen: SeenUse, held: CallResult, kept: PinnedUse
    ) -> PinnedUse:
        recomputed = replace(kept, action=RECOMPUTE, geometry=seen.tensor.geometry)
        call = self._call_of.get(id(held.call))
        if call is None:
            return kept
        node = self._settled.node_of.get(id(held.call))
        if node is None and self._is_watched(call):
            return recomputed
        found = None
        if node is not None:
            recomputed = replace(recomputed, computed=(node, held.slot))
            if seen.tensor.maker is not None:
                found = recomputed if seen.tensor.maker[0] == node else None
            elif seen.nodes_before - 1 == node:  # statistics of a norm, saved by its own node
                found = self._proven_use(number, seen, recomputed)
        if found is None:
            self._lost.add(call.ordinal)
        return found or kept

    def _proven_use(self, number: int, seen: SeenUse, use: PinnedUse) -> PinnedUse | None:
        """The node that saves it is known only from tensors that come later."""
        node = seen.nodes_before - 1
        if node not in self._pass.patterns:
            return None
        own = seen.tensor.node
        if (
            own is not self._pass.nodes[node]
            and node not in self._proven
            and not self._prove(node, number)
        ):
            return None
        self._proven.add(node)
        return replace(use, proven_by_node=node)

    def _prove(self, node: int, number: int) -> bool:
        for later in range(number + 1, min(number + _FURTHEST, len(self._seen.uses))):
            use = self._seen.uses[later]
            path = self._pass.path(use.tensor.node, node)
            if path is not None:
                self._proofs_of_uses[later].append(Proof(node, path))
                return True
        for result in self._seen.results:
            if number < result.uses_before <= number + _FURTHEST:
                path = self._pass.path(result.tensor.node, node)
                if path is not None:
                    place = (result.module, result.place)
                    self._proofs_of_results[place].append(Proof(node, path))
                    return True
        return False

    # all together

    def _assembled(self, uses: list[PinnedUse]) -> PinnedPlan:
        with_proofs = tuple(
            replace(use, proofs=tuple(self._proofs_of_uses[number]))
            for number, use in enumerate(uses)
        )
        results = defaultdict[Any, list[PinnedResult]](list)
        places = {**dict.fromkeys(self._proofs_of_results), **dict.fromkeys(self._settled.results)}
        for module, place in places:
            source = self._settled.results.get((module, place))
            proofs = tuple(self._proofs_of_results[module, place])
            results[module].append(PinnedResult(place, source, proofs))
        patterns = {
            number: self._pass.patterns[number] for number in self._settled.nodes | self._proven
        }
        patterns.update(self._settled.with_numbers)
        return PinnedPlan(
            followed=self._seen.followed,
            uses=with_proofs,
            nodes=self._seen.nodes,
            patterns=patterns,
            calls=self._settled.calls,
            slots=self._settled.slots,
            sources=self._settled.sources,
            copied=frozenset(self._settled.copied),
            results={module: tuple(wanted) for module, wanted in results.items()},
            dispatched={module: self._seen.entered[module] for module in self._watched},
            epsilons=tuple(self._settled.epsilons),
            lost=frozenset(self._lost),
            pauses=HookPauses(),
        )


# What a watched pass showed: by number and by content.

_LONGEST_PATH = 8  # edges from a later tensor's node to the one that is to be proven


class NotSettledError(Exception):
    """Nodes do not tell all about a call."""


class SeenPass:
    """What the pass showed, by number and by content."""

    def __init__(self, seen: PinningFollower) -> None:
        self.seen = seen
        self.nodes = all_nodes(seen.roots.values(), seen.first)
        self.patterns = {n: NodePattern.of(node, seen.first) for n, node in self.nodes.items()}
        self._uses_of: defaultdict[Any, list[int]] = defaultdict(list)  # by content and maker
        self._results_of: defaultdict[Any, list[SeenResult]] = defaultdict(list)
        for number, use in enumerate(seen.uses):
            if use.plain:
                self._uses_of[use.tensor.content, use.tensor.maker].append(number)
        for result in seen.results:
            self._results_of[result.tensor.content, result.tensor.maker].append(result)

    def pattern(self, number: int | None) -> NodePattern | None:
        return None if number is None else self.patterns.get(number)

    def source(self, tensor: SeenTensor, node: int) -> tuple[SourceKey, int | SeenResult, Geometry]:
        """Where a kept argument of this node is seen: as a saved tensor, or a module's result."""
        uses = self._uses_of[tensor.content, tensor.maker]
        if tensor.maker is None:
            for number in uses:
                if self.seen.uses[number].nodes_before - 1 == node:
                    geometry = self.seen.uses[number].tensor.geometry
                    return ("use", number), number, geometry
            raise NotSettledError("an input without gradient that its node does not keep")
        if uses:
            return tensor.maker, uses[0], self.seen.uses[uses[0]].tensor.geometry
        for result in self._results_of[tensor.content, tensor.maker]:
            return tensor.maker, result, result.tensor.geometry
        raise NotSettledError("an input that is never seen")

    def path(self, start: Any, target: int) -> tuple[int, ...] | None:
        """The shortest way along edges to the target."""
        level: list[tuple[Any, tuple[int, ...]]] = [(start, ())]
        for _ in range(_LONGEST_PATH):
            following = []
            for node, path in level:
                number = -1 if node is None else node._sequence_nr() - self.seen.first
                if number == target:
                    return path
                if number > target and number in self.nodes:
                    edges = enumerate(node.next_functions)
                    following += [(below, (*path, place)) for place, (below, _) in edges]
            level = following[:64]
        return None
