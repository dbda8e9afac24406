"""What `save_memory` returns: one pass is recorded, later ones follow the plan and keep less."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.model_structure import is_compiled
from stepscope.fix.saved.follower import (
    FollowedPlan,
    PassReport,
    PlanFollower,
    other_hooks_are_active,
    unpack_held,
)
from stepscope.fix.saved.operators import is_capturing, is_plain, tensors_in
from stepscope.fix.saved.planner import PlannedStep, plan_nothing, plan_step
from stepscope.fix.saved.recorder import StepRecorder
from stepscope.fix.saved.step_promise import SavePromise, promise
from stepscope.fix.saved.step_record import StepRecord
from stepscope.fix.saved.step_times import (
    FOLLOWED,
    PLAIN,
    RECORDED,
    BackwardReadings,
    StepWatch,
    following_costs,
)
from stepscope.records.change_values import MemoryTarget
from stepscope.text.figures import percent

if TYPE_CHECKING:
    from stepscope.fix.saved.save_plan import SavePlan

_MOST_PLANS = 8  # one for each combination of input shapes
_MOST_DEVIATIONS = 3  # in a row: then that plan is given up
_LEAST_PLAIN = 4  # passes before the recorded one, where steps are timed
_CHECKED_AFTER = 12  # passes that followed the plan
_TOLERANCE = 1.1  # of the time allowed: steps vary
_OF_PASSES = frozenset(  # what `_start_over` sets
    ("_passes", "_depth", "_caller", "_handled", "_stack", "_watch", "_active", "_current")
)


@dataclass(slots=True)
class _KnownPass:
    """Passes with inputs of one kind. The plan is made when it is first asked for: by then the
    recorded step's backward has run, and the allocator has told what it needed."""

    key: Any
    seen: int = 0
    record: StepRecord | None = None
    readings: BackwardReadings | None = None  # of the recorded pass's backward
    planned: PlannedStep | None = None
    followed: FollowedPlan | None = None
    report: PassReport | None = None  # of the first pass that followed the plan
    deviations: int = 0  # in a row
    followed_passes: int = 0
    checked: bool = False  # the plan's steps were compared with plain ones
    given_up: bool = False

    def use(self, planned: PlannedStep) -> None:
        self.planned, self.followed, self.report = planned, FollowedPlan.of(planned.plan), None

    def unpack_recorded(self, recorder: StepRecorder, held: Any) -> Any:
        """Backward reads the recorded pass: what is allocated then says what a step needs."""
        if self.readings is not None:
            try:
                self.readings.reads(held.number)
            except Exception:  # the plan is made without them
                self.readings = None
        return recorder.unpack(held)


class MemorySaver:
    """Attached to a model. `plan` is the latest one, None before a pass was recorded; `notes` say
    what could not be done, `ended` why nothing is done any more. `remove()` leaves the model as it
    was."""

    planning_ns = 0  # that all plans took

    def __init__(
        self,
        model: torch.nn.Module,
        target: MemoryTarget,
        *,
        plan: SavePlan | None,
        dry_run: bool,
        warmup: int,
        lossy: str | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.ended: str | None = None
        self._model = model
        self._target = target
        self._dry_run = dry_run
        self._warmup = warmup
        self._lossy = lossy
        self._given = plan
        self._latest: SavePlan | None = plan
        self._start_over()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._enters, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leaves, with_kwargs=True, always_call=True),
        ]

    def _start_over(self) -> None:
        """No pass has been seen, and none is under way."""
        self._passes: dict[Any, _KnownPass] = {}
        self._depth = 0
        self._caller: Any = None  # the frame that runs the model's forward
        self._handled: BaseException | None = None  # the error that was handled when it began
        self._stack: ExitStack | None = None
        self._watch = StepWatch()
        self._active: StepRecorder | PlanFollower | None = None
        self._current: _KnownPass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model has a saver of its own, which records its own passes: what this one
        knows is tied to this model's tensors."""
        self._end_interrupted()
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PASSES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_over()

    @property
    def plan(self) -> SavePlan | None:
        """The latest; None before a pass was recorded."""
        with self._unharmed():
            for known in self._passes.values():
                self._make_plan(known)
        return self._latest

    @property
    def settled(self) -> bool:
        """Whether the plans stay as they are, for the inputs seen so far."""
        if self.ended is not None:
            return True
        return bool(self._passes) and all(
            known.given_up
            or (
                known.followed is not None
                and (not self._follows(known.followed) or self._stays(known))
            )
            for known in self._passes.values()
        )

    @property
    def held_bytes(self) -> int | None:
        """Return what the first pass with the plan held for backward; None before."""
        reports = [known.report for known in self._passes.values() if known.report is not None]
        return reports[-1].held_bytes if reports else None

    @property
    def promise(self) -> SavePromise | None:
        """Peak and time of a step with the latest plan; None before a pass was recorded. It becomes
        better when the recorded step's backward has run, and when steps were timed."""
        with self._unharmed():
            recorded = [known for known in self._passes.values() if known.record is not None]
            if recorded:
                self._make_plan(recorded[-1])
                planned, key = recorded[-1].planned, recorded[-1].key
                tried_ns = self._watch.step_ns(key, FOLLOWED) if recorded[-1].checked else None
                if planned is not None:
                    step_ns = self._watch.step_ns(key, PLAIN)
                    return promise(planned, step_ns=step_ns, tried_ns=tried_ns)
        return None

    @property
    def measured_step_ns(self) -> int | None:
        """Return the median step with the latest plan; None before there were two."""
        followed = [known for known in self._passes.values() if known.report is not None]
        return self._watch.step_ns(followed[-1].key, FOLLOWED) if followed else None

    def remove(self) -> None:
        self._end_interrupted()
        self._detach()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def forward(self, *inputs: Any) -> Iterator[None]:
        """Around the model and the loss, where the loss keeps much itself; `inputs` tell batches
        of different shapes apart. Call backward outside."""
        with self._unharmed():
            self._begin(inputs, None)
        try:
            yield
        except BaseException:
            with self._unharmed():
                self._end(None, failed=True)
            raise
        with self._unharmed():
            self._end(None)

    # one pass

    def _enters(self, module: Any, args: Any, kwargs: Any) -> None:
        del module
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            with self._unharmed():
                self._begin((args, kwargs), caller)

    def _leaves(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Torch also calls this where forward raised, while it handles the error."""
        del module, args, kwargs
        if not torch.compiler.is_compiling():
            failed = sys.exc_info()[1] is not self._handled
            with self._unharmed():
                self._end(output, failed=failed)

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """A failure of ours ends the remedy, and never the training."""
        try:
            yield
        except Exception as error:
            self._stop(
                f"save_memory failed ({type(error).__name__}: {error}). Everything stays "
                "saved from now on, and the training goes on. Please report this"
            )

    def _stop(self, why: str) -> None:
        """Nothing more is done to the model; `notes` say why."""
        stack, self.ended = self._stack, why
        self._note(why)
        if stack is not None:
            with suppress(Exception):
                stack.close()
        self._start_over()
        self._detach()

    def _begin(self, inputs: Any, caller: Any) -> None:
        if self.ended is not None:
            return
        self._end_interrupted()
        self._depth += 1
        if self._depth == 1:
            self._caller, self._handled = caller, sys.exc_info()[1]
        if self._depth > 1 or not torch.is_grad_enabled() or not self._may_act():
            return
        known = self._known(inputs)
        if known is None or known.given_up:
            return
        if known.readings is not None:
            known.readings.end()
        self._make_plan(known)
        if is_capturing() and known.report is None:
            self._note(
                "a CUDA graph was captured before the plan was active, so everything stays "
                "saved in it. Run a few steps before the capture"
            )
            return
        known.seen += 1
        self._watch.begins(known.key, _device_of(self._model))
        follows = known.followed is not None and self._follows(known.followed)
        records = known.followed is None and known.seen > self._plain_passes()
        if not follows and not records:
            return
        part = compiled_part(self._model)
        if part is not None:
            self._stop(COMPILED_PART.format(part=part))
            return
        active: StepRecorder | PlanFollower
        unpack: Any = unpack_held
        if known.followed is not None:
            active = PlanFollower(known.followed, self._owned() if known.report is None else None)
        else:
            active = StepRecorder(self._model, lossy=self._lossy, heavy=self._target.heavy)
            unpack = functools.partial(known.unpack_recorded, active)
        self._watch.is_of(FOLLOWED if follows else RECORDED)
        self._active, self._current, self._stack = active, known, ExitStack()
        if isinstance(active, StepRecorder):
            self._stack.callback(active.detach)
        hooks = torch.autograd.graph.saved_tensors_hooks(active.pack, unpack)
        self._stack.enter_context(hooks)
        self._stack.enter_context(active)

    def _plain_passes(self) -> int:
        """Before the recorded one."""
        return max(self._warmup, _LEAST_PLAIN) if self._is_timed() else self._warmup

    def _is_timed(self) -> bool:
        """On a CPU a plan counts all its costs; on a GPU only its steps show what they hide."""
        on_gpu = _device_of(self._model).type == "cuda"
        return on_gpu and self._target.max_slowdown is not None

    def _stays(self, known: _KnownPass) -> bool:
        return known.checked if self._is_timed() else known.followed_passes > 0

    def _end_interrupted(self) -> None:
        """Ctrl-C ends a pass without torch calling any hook."""
        if self._caller is not None and not _is_running(self._caller):
            self._depth = 1
            self._end(None, failed=True)

    def _end(self, output: Any, *, failed: bool = False) -> None:
        if self.ended is not None:
            return
        self._depth -= 1
        if self._depth:
            return
        active, known, stack = self._active, self._current, self._stack
        self._active = self._current = self._stack = self._caller = self._handled = None
        if stack is None or known is None:
            return
        stack.close()
        if failed:
            return
        if isinstance(active, PlanFollower):
            self._end_followed(known, active)
        elif active is not None:
            self._end_recorded(known, active, output)

    def _end_recorded(self, known: _KnownPass, recorder: StepRecorder, output: Any) -> None:
        if recorder.failure is not None:
            raise recorder.failure
        record = recorder.finish(output)
        if any(use.consumer.startswith(_COMPILED_NODE) for use in record.uses):
            self._stop(COMPILED_PART.format(part="a function that it calls"))
            return
        watch_ns, repeat_ns = following_costs()
        known.record = replace(
            record,
            watch_ns=watch_ns,
            repeat_ns=repeat_ns,
            slack_ns=self._watch.slack_ns(known.key),
            surroundings=self._watch.surroundings(list(self._model.parameters())),
            measured_step_ns=self._watch.step_ns(known.key, PLAIN),
        )
        known.readings = BackwardReadings(self._watch.device)

    def _end_followed(self, known: _KnownPass, follower: PlanFollower) -> None:
        report = follower.finish(self._owned() if known.report is None else None)
        if report.failure is not None:
            raise report.failure
        if report.uncaptured:
            self._note(
                "a CUDA graph was captured. What is planned as "
                f"{', '.join(sorted(report.uncaptured))} stays saved in it, because its size "
                "varies from step to step"
            )
        if report.deviation is not None:
            self._deviated(known, report.deviation)
            return
        known.deviations = 0
        known.report = known.report or report
        known.followed_passes += 1
        is_due = known.followed_passes > _CHECKED_AFTER and not known.checked
        if is_due and self._is_timed() and not is_capturing():
            self._check(known)

    def _deviated(self, known: _KnownPass, why: str) -> None:
        self._note(f"a pass differed from the recorded one, so its rest stays saved: {why}")
        known.deviations += 1
        if known.deviations >= _MOST_DEVIATIONS:
            known.given_up = True
            self._note(
                f"{_MOST_DEVIATIONS} passes in a row differed. From now on everything stays "
                "saved for inputs of these shapes. The model's operators change from pass to "
                "pass"
            )

    def _check(self, known: _KnownPass) -> None:
        """Correct the plan once, where its steps are slower than allowed."""
        known.checked = True
        plain_ns = self._watch.step_ns(known.key, PLAIN)
        followed_ns = self._watch.step_ns(known.key, FOLLOWED)
        limit, record, planned = self._target.max_slowdown, known.record, known.planned
        if plain_ns is None or followed_ns is None or record is None or planned is None:
            return
        share = followed_ns / plain_ns - 1
        if limit is None or share <= _TOLERANCE * limit:
            return
        planned_ns = max(1, planned.plan.extra_ns)
        dearer = max(1.0, (followed_ns - plain_ns) / planned_ns)
        other = plan_step(replace(record, dearer=dearer), self._target)
        said = f"steps took {percent(share)} longer than plain ones, {percent(limit)} are allowed"
        if other.plan.changes_something() and other.plan.extra_ns < planned_ns * dearer:
            self._note(f"{said}: the plan was corrected once")
        else:
            said += (
                ". The CPU cannot hide the plan's work, so everything stays saved. Compiling "
                "needs none: save_memory(model, compile=True)"
            )
            self._note(said)
            other = plan_nothing(record, self._target, said)
        self._watch.forget_followed()
        known.use(other)
        self._latest = other.plan

    def _make_plan(self, known: _KnownPass) -> None:
        """Once more if backward has run since; a plan that is carried out stays."""
        if known.record is None or known.followed_passes:
            return
        readings = () if known.readings is None else tuple(known.readings.readings)
        if known.planned is None or len(readings) > len(known.record.readings):
            began = time.perf_counter_ns()
            known.record = replace(known.record, readings=readings)
            known.use(plan_step(known.record, self._target))
            self.planning_ns += time.perf_counter_ns() - began
            self._latest = known.planned.plan if known.planned is not None else None

    def _known(self, inputs: Any) -> _KnownPass | None:
        key = pass_key(self._model, inputs)
        known = self._passes.get(key)
        if known is None and len(self._passes) >= _MOST_PLANS:
            self._note(
                f"there are more than {_MOST_PLANS} kinds of input shapes. The others save "
                "everything. Pad batches to fewer shapes"
            )
            return None
        if known is None:
            known = self._passes[key] = _KnownPass(key=key, followed=self._plan_for_another())
        return known

    def _plan_for_another(self) -> FollowedPlan | None:
        """The given plan; where a larger batch is to fit, the one of the first batch: recording
        the larger one would keep everything once more."""
        plan = self.plan
        if self._given is None and plan is not None and self._target.batch is not None:
            return FollowedPlan.of(plan.for_other_shapes())
        return None if self._given is None else FollowedPlan.of(self._given)

    def _follows(self, followed: FollowedPlan) -> bool:
        return not self._dry_run and followed.plan.changes_something()

    def _may_act(self) -> bool:
        if torch._C._are_functorch_transforms_active():
            self._note(
                "torch.func transforms allow no hooks, so everything stays saved inside them"
            )
            return False
        if other_hooks_are_active():
            self._note(
                "saved-tensor hooks are active around the model (checkpointing, offloading). "
                "They come first, and save_memory leaves everything to them"
            )
            return False
        return True

    def _owned(self) -> frozenset[int]:
        held = [*self._model.parameters(), *self._model.buffers()]
        return frozenset(t.untyped_storage()._cdata for t in held if is_plain(t))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


# What tells passes apart: inputs, training and autocast. Each kind has a plan of its own.


def pass_key(model: torch.nn.Module, inputs: Any) -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    found = tensors_in(list(inputs) if isinstance(inputs, tuple) else inputs)
    return (
        model.training,
        tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in found),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
    )


def _device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _is_running(frame: Any) -> bool:
    """Whether it is one of those that called this."""
    current: Any = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


# Which parts of a model torch.compile has taken.

COMPILED_PART = (
    "part of the model is compiled ({part}), so everything stays saved. Compile the whole "
    "model and call save_memory(model, reduce=0.5) on that. Or call save_memory on the parts "
    "that are not compiled"
)
_COMPILED_NODE = "CompiledFunctionBackward"


def compiled_part(model: torch.nn.Module) -> str | None:
    """The first compiled module; None where all is eager."""
    return next((name for name, module in model.named_modules() if is_compiled(module)), None)
