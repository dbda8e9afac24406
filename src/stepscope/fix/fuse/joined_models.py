"""The inside of an array: models joined into stacks, a template that computes for all, and
modules computed model by model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import (
    KnownValues,
    check_alike,
    check_given,
    check_lengths,
    make_template,
    refresh_kept_tensors,
    settle,
)
from stepscope.fix.fuse.behaviours import hooks_made, modules_alone
from stepscope.fix.fuse.kernel_choice import Choose, Chooser, usual_choice
from stepscope.fix.fuse.ledger import ArrayLedger, timed
from stepscope.fix.fuse.optimizer import ArrayOptimizer
from stepscope.fix.fuse.python_state import PythonState
from stepscope.fix.fuse.random_streams import (
    Draws,
    OwnDraws,
    Streams,
    as_drawn_alone,
    check_nothing_drawn,
    draws_together,
    host_random_state,
)
from stepscope.fix.fuse.rules import stack_input, stack_results
from stepscope.fix.fuse.stacked import (
    NotFusableError,
    Stacked,
    is_capturing,
    is_final,
    is_ordinary,
    of_model,
)
from stepscope.fix.fuse.stacks import Stacks, WindowGradients

# Before the template computes, `follow` brings it what the user changed in the models; after it,
# what its code changed goes to every model.


class JoinedModels(nn.Module):
    """Models whose tensors are windows into stacks, and a template whose code computes for all."""

    _stacks: Stacks

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        seeds: Sequence[int | None] | None = None,
        random: Sequence[list[Any]] | None = None,
        draws: Draws = "own",
        choose: Choose | None = None,
        in_place: bool = False,
    ) -> None:
        """`in_place`: models that are windows into one memory already, side by side, stay there."""
        super().__init__()
        check_given(models)
        check_lengths(len(models), optimizers=optimizers, schedulers=schedulers, seeds=seeds or ())
        self._models = tuple(models)  # a tuple: not this module's children
        self._schedulers = list(schedulers)
        self._streams = Streams(seeds or [None] * len(models), draws_together(draws))
        if random is not None:
            self._streams.states = [list(states) for states in random]
        self.chooser = Chooser(choose or usual_choice(models[0]))
        self._ledger = ArrayLedger()
        self._gradients = WindowGradients()
        self._stepped_with: Any = None  # a gradient that has been used
        self._alone: dict[str, str] = {}
        self._proven: set[tuple[str, bool]] = set()  # modules and modes
        self._hooks_seen = self.changes = 0
        self._join(in_place=in_place)
        self.optimizer = ArrayOptimizer(self, optimizers) if optimizers else None
        if self.optimizer is not None:
            self.optimizer.adopt()

    def arguments(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Every tensor in these as a Stacked, for models as they are now."""
        self.follow()
        return list(self._shared([self.stack(one) for one in inputs]))

    def stacked_tensors(self) -> list[Stacked]:
        """All that the template's modules hold."""
        return [
            one
            for module in self._template[0].modules()
            for kind in (module._parameters, module._buffers)
            for one in kind.values()
            if isinstance(one, Stacked)
        ]

    def stack(self, value: Any) -> Any:
        """A list with one tensor for each model becomes a Stacked; all else stays as it is."""
        return stack_input(value, len(self))

    def gather_gradients(self) -> None:
        """Those of the models' own weights come to the stacks."""
        self._gradients.fold()

    def without_gradient(self) -> dict[str, list[bool]]:
        """Weights that a model's code left out while another's did not: where each model's stays
        as it is, as its optimizer would find no gradient there alone."""
        return self._gradients.left_out(dict(self.named_parameters()))

    def follow(self) -> None:
        """Go on with the models as the user left them: other settings, modes, weights or hooks."""
        if self._streams.are_used or self._is_recorded():
            return
        hooks = hooks_made() != self._hooks_seen
        if self._stacks.have_moved() or (hooks and modules_alone(self._models) != self._hooked):
            # The models have other weights, modules or hooks than before.
            former, windows = self.optimizer, self._stacks.windows
            states = former.states_of(range(len(self))) if former is not None else None
            self._join()
            if former is not None and states is not None:
                former.leave()
                same = {
                    name
                    for name, (_, own) in self._stacks.windows.items()
                    if name in windows and all(map(is_, own, windows[name][1]))
                }
                kept = {name: state for name, state in states[0].items() if name in same}
                self.optimizer = ArrayOptimizer(self, former.optimizers)
                self.optimizer.restore((kept, states[1]))
                self.optimizer.go_on_as(former)
        elif self._state.from_models():
            self._proven.clear()
            self.changes += 1
        self._hooks_seen = hooks_made()

    def check_can_capture(self) -> None:
        """UsageError for what Python does in backward, which no CUDA graph repeats."""
        self.follow()
        if self._gradients.are_hooked():
            raise UsageError("weights have hooks, but a captured step would not call them")

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, model: int) -> nn.Module:
        """One model, as it is now; a window into the array."""
        return self._models[model]

    # Inside.

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Meanwhile rules find this array's random numbers and choices, and note what they do."""
        if self._streams.are_used:
            yield
            return
        watches = not self._is_recorded()
        before = (host_random_state(), self._streams.outside()) if watches else None
        draws = OwnDraws(len(self))
        with self._ledger.recording(), self._streams.used(), self.chooser.used(), draws:
            yield
        self._stacks.keep_replaced()
        if before is None:
            self._state.check_keeps_nothing()
            return
        check_nothing_drawn(before[0])
        self._streams.check_outside(before[1])
        self._state.to_models()

    def _is_recorded(self) -> bool:
        """Whether a compiler or a CUDA graph records what is computed."""
        recorded = any(not is_ordinary(one.physical) for one in self._some)
        return recorded or is_capturing()

    def _shared(self, values: Any) -> Any:
        """Every other tensor in these is one that all models have in common."""

        def share(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and not isinstance(value, Stacked):
                return Stacked.share(value, len(self))
            return value

        return tree_map(share, values)

    def _join(self, *, in_place: bool = False) -> None:
        """Stack all models' tensors, and make the models' own windows into the stacks."""
        self._hooked = modules_alone(self._models)
        check_alike(self._models)
        known = KnownValues(self._models[0])
        template = make_template(self._models[0], known.knows)
        settle(template, self._models, known.knows)
        self._template = (template,)
        self._proven.clear()
        self._alone.clear()
        self._alone.update(self._hooked)
        self._stacks = Stacks(self._models, template, vars(self).get("_stacks"), in_place)
        for name in list(self._parameters):
            del self._parameters[name]
        for name, stack in self._stacks.parameters.items():
            self.register_parameter(name, stack)
        self._gradients.follow(self._stacks.windows)
        for path, module in template.named_modules():
            refresh_kept_tensors(module)
            module.forward = partial(self._compute, path, module.forward)
        self._state = PythonState(self._models, template)
        self._some = self.stacked_tensors()[:1]
        self._hooks_seen = hooks_made()
        self.changes += 1

    def _take(
        self,
        kept: list[int],
        new: tuple[nn.Module, ...],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        seed: int | None = None,
    ) -> None:
        """Go on with these models, and new ones after them."""
        joined = self.optimizer
        states = joined.states_of(kept) if joined is not None else None
        optimizers = [joined.optimizers[model] for model in kept] if joined is not None else []
        streams = [self._streams.states[model] for model in kept]
        self._models = (*(self._models[model] for model in kept), *new)
        if self._schedulers:
            self._schedulers = [self._schedulers[model] for model in kept]
            self._schedulers += [scheduler] * len(new)
        fresh = Streams([seed] * len(new))
        self._streams.states = streams + fresh.states
        if joined is not None and optimizer is not None and optimizer.state:
            for place in kept:
                joined.export(place)
            states = None
        self._join()
        if joined is not None:
            joined.leave()
            optimizers += [optimizer] if optimizer is not None else []
            self.optimizer = ArrayOptimizer(self, optimizers)
            if states is None:
                self.optimizer.adopt()
            else:
                self.optimizer.restore(states)
            self.optimizer.go_on_as(joined)

    def _compute(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One module of the template: for all models at once, or else one by one."""
        if not self._streams.are_used:  # a checkpointed module, computed again for backward
            with self._computing(), self._streams.repeating():
                return self._compute(path, forward, *args, **kwargs)
        if path in self._alone:
            return self._compute_alone(path, args, kwargs)
        if (path, self.training) in self._proven:
            return forward(*args, **kwargs)
        before, asked = self.changing(path), self._ledger.answers()
        try:
            with self._streams.only():
                result = forward(*args, **kwargs)
        except Exception as error:
            if not may_compute_alone(error):
                raise
            self._state.forget(path)
            self._stacks.forget_replaced(path)
            self.undo(before)
            self._alone[path] = reason_of(error)
            return self._compute_alone(path, args, kwargs)
        if self._ledger.answers() == asked:  # else the models may disagree the next time
            self._proven.add((path, self.training))
        return result

    def _compute_alone(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._models, self._template[0], self._streams
        with timed("modules", path, next(iter(self._stacks.by_name.values()), None)):
            result = compute_alone(*parts, path, args, kwargs)
        self._stacks.take_moved(path)
        self._stacks.take_replaced(path)
        self._state.from_models(path)
        return result

    def changing(self, path: str = "") -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Copy what a forward pass may change before it fails: buffers and random numbers."""
        buffers = dict(self._template[0].get_submodule(path).named_buffers())
        saved = {
            name: one.physical.clone() for name, one in buffers.items() if isinstance(one, Stacked)
        }
        return {f"{path}.{name}".lstrip("."): one for name, one in saved.items()}, [
            list(states) for states in self._streams.states
        ]

    def undo(
        self, before: tuple[dict[str, torch.Tensor], list[Any]], models: Sequence[int] | None = None
    ) -> None:
        """Go back to what `changing` gave, for all models or these."""
        chosen = range(len(self)) if models is None else models
        with torch.no_grad():
            for name, values in before[0].items():
                for model in chosen:
                    self._stacks.by_name[name][model].copy_(values[model])
        for model in chosen:
            self._streams.states[model] = list(before[1][model])


# A module that cannot compute for all models at once, computed by each model's own.

_OWN = "_raised_by_one_model"  # an error of the model's code itself


def compute_alone(
    models: Sequence[nn.Module],
    template: nn.Module,
    streams: Streams,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The results of all models' modules of this path, stacked. Their weights are leaves with
    hooks of their own, whose gradients stacks.py adds to the stacks'."""
    # An object whose tensors cannot be taken apart goes to no model.
    arguments = (args, kwargs)
    for value in tree_leaves(arguments):
        held = getattr(value, "__dict__", {})
        if not isinstance(value, Stacked) and any(
            isinstance(one, Stacked) for one in tree_leaves(held)
        ):
            raise NotFusableError(f"a {type(value).__name__} holds tensors of all models")
    placed = template.get_submodule(path)
    recorded = any(
        isinstance(one, Stacked) and not is_ordinary(one.physical)
        for module in placed.modules()
        for one in (*module._parameters.values(), *module._buffers.values())
    )
    results = []
    for number, model in enumerate(models):
        module = model.get_submodule(path)
        own_args, own_kwargs = tree_map(partial(of_model, number), (args, kwargs))
        with streams.of(number), as_drawn_alone():
            try:
                if recorded:  # a compiler follows no weights but the stacks
                    tensors = _own_tensors(module, placed, number)
                    result = torch.func.functional_call(module, tensors, own_args, own_kwargs)
                else:
                    result = module(*own_args, **own_kwargs)
            except NotFusableError:
                raise
            except Exception as error:
                vars(error)[_OWN] = True
                raise
            results.append(result)
    return stack_results(results, apart=not path)


def may_compute_alone(error: Exception) -> bool:
    """Whether each model may succeed where all at once did not."""
    return not is_final(error) and _OWN not in vars(error)


def reason_of(error: Exception) -> str:
    if isinstance(error, NotFusableError):
        return str(error)
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"


def _own_tensors(module: nn.Module, template: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """Slices of the stacks, so that gradients reach them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    slices = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        place = template.get_submodule(owner)
        held = place._parameters.get(last)
        stacked: Any = held if held is not None else place._buffers[last]
        slices[name] = stacked.physical[number]
    return slices
