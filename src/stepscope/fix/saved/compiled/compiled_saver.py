"""What `save_memory` returns for a model that is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepscope.fix.saved.compiled.graph_plan import GraphPlan
from stepscope.records.change_values import MemoryTarget


class CompiledSaver:
    def __init__(self, model: torch.nn.Module, target: MemoryTarget, *, dry_run: bool = False, exact: bool = True) -> None:
        from stepscope.fix.saved.compiled.partitioner import MemoryPartitioner

        self.notes: list[str] = []
        self.ended: str | None = None
        self.plans: list[GraphPlan] = []
        self._model = model
        self._partitioner = MemoryPartitioner(
            target, dry_run=dry_run, exact=exact, on_plan=self.plans.append, on_failure=self.notes.append
        )
        self._call = model._compiled_call_impl
        model._compiled_call_impl = self._run

    def remove(self) -> None:
        self._model._compiled_call_impl = self._call

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self.forward():
            return self._call(*args, **kwargs)

    @contextmanager
    def forward(self) -> Iterator[None]:
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        before = inductor.custom_partitioner_fn, functorch.enable_autograd_cache
        inductor.custom_partitioner_fn = self._partitioner
        functorch.enable_autograd_cache = False
        try:
            yield
        finally:
            inductor.custom_partitioner_fn, functorch.enable_autograd_cache = before
