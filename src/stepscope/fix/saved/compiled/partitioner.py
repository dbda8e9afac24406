"""The partitioner that torch.compile calls: it plans, and splits the joint graph again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from stepscope.fix.saved.compiled.graph_plan import GraphPlan, describe
from stepscope.fix.saved.compiled.operator_costs import set_costs
from stepscope.fix.saved.compiled.recompute_ladder import RecomputeLadder
from stepscope.fix.saved.compiled.split_graphs import split_again
from stepscope.fix.saved.compiled.step_graph import UnplannableGraphError, read_step_graph
from stepscope.records.change_values import MemoryTarget

SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # of the ladder's picture
_LADDER_SECONDS = 0.3


class MemoryPartitioner(CustomPartitionerFn):
    """Splits as the compiler does, then lets backward recompute what the plan says.

    Whatever fails here leaves the compiler's own split.
    """

    def __init__(
        self,
        target: MemoryTarget,
        *,
        dry_run: bool,
        exact: bool,
        on_plan: Callable[[GraphPlan], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._target, self._dry_run, self._exact = target, dry_run, exact
        self._on_plan, self._on_failure = on_plan, on_failure

    def __deepcopy__(self, memo: Any) -> MemoryPartitioner:
        """The compiler copies its settings; the model's saver hears of plans all the same."""
        del memo
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The compiler may also write its settings down, for processes that only generate code."""
        return {"_target": self._target, "_dry_run": True, "_exact": self._exact}

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        split = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        try:
            return self._plan(*split, options)
        except UnplannableGraphError as error:
            self._on_failure(f"A graph stays as it is: {error}.")
        except Exception as error:  # the training goes on without a plan
            self._on_failure(f"A graph stays as it is: planning failed ({error!r}).")
        return split

    def uuid(self) -> Any:
        """The compiler's cache keys hold the graphs that come out of here; no more is needed."""
        return "stepscope-memory-partitioner-1"

    def _plan(
        self, forward: fx.GraphModule, backward: fx.GraphModule, options: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        begin = time.perf_counter_ns()
        outputs = options["num_fwd_outputs"]
        owned = options.get("static_lifetime_input_indices") or ()
        graph = read_step_graph(forward, backward, outputs, owned, exact=self._exact)
        if not graph.saved:
            return forward, backward
        device = _device(forward)
        speed = set_costs(graph, device)
        ladder = RecomputeLadder(graph, speed)
        static_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        chosen = ladder.choose(self._target, static_bytes)
        points = ladder.points(SHARES, _LADDER_SECONDS)
        split = forward, backward
        if chosen.repeated and not self._dry_run:
            split = split_again(forward, backward, outputs, graph, set(chosen.repeated))
        planning_ns = time.perf_counter_ns() - begin
        plan = describe(graph, ladder.plain, chosen, planning_ns)
        self._on_plan(plan.with_ladder(SHARES, [point.step for point in points]))
        return split


def _device(forward: fx.GraphModule) -> torch.device:
    devices = [
        tensor.device
        for node in forward.graph.nodes
        if isinstance(tensor := node.meta.get("val"), torch.Tensor)
    ]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
