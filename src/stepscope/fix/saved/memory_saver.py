"""What `save_memory` returns: the first passes are recorded, later ones keep less for backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.model_structure import is_compiled
from stepscope.fix.saved.encodings.offload import COPY_WAITS
from stepscope.fix.saved.follower import (
    FollowedPlan,
    PassReport,
    PlanFollower,
    is_following,
    other_hooks_are_active,
    unpack_held,
)
from stepscope.fix.saved.known_pass import (
    KnownPass,
    check_steps,
    completed,
    device_of,
    is_running,
    pass_key,
)
from stepscope.fix.saved.operators import is_capturing, is_plain
from stepscope.fix.saved.pin_plan import pin_plan
from stepscope.fix.saved.pinned_follower import PinnedFollower
from stepscope.fix.saved.pinned_plan import PinningFollower
from stepscope.fix.saved.planner import PlannedStep, plan_step, without_repeating
from stepscope.fix.saved.recorder import StepRecorder
from stepscope.fix.saved.step_times import (
    FOLLOWED,
    LEAST_PLAIN,
    RECORDED,
    AddedTime,
    BackwardPeaks,
    StepWatch,
)
from stepscope.records.change_values import MemoryTarget
from stepscope.text.figures import duration, percent, size

if TYPE_CHECKING:
    from stepscope.fix.saved.save_plan import SavePlan
    from stepscope.fix.saved.step_record import StepRecord

_MOST_PLANS = 8  # one for each combination of input shapes
_NOTHING = frozenset[int]()
# What `_start_over` sets.
_OF_PASSES = frozenset(
    ("_passes", "_depth", "_caller", "_handled", "_stack", "_watch", "_active", "_current")
)


class MemorySaver:
    """Attached to a model. `plan` is the latest one, None before a pass was recorded; `notes` say
    what could not be done, `ended` why nothing is done any more. `remove()` leaves the model as it
    was."""

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
        self._inner = ModuleHooks(self._enters_inner, self._leaves_inner)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._enters, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leaves, with_kwargs=True, always_call=True),
        ]

    def _start_over(self) -> None:
        """No pass has been seen, and none is under way."""
        self._passes: dict[Any, KnownPass] = {}
        self._depth = 0
        self._caller: Any = None  # the frame that runs the model's forward
        self._handled: BaseException | None = None  # the error that was handled when it began
        self._stack: ExitStack | None = None
        self._watch = StepWatch()
        self._active: StepRecorder | PlanFollower | None = None
        self._current: KnownPass | None = None

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
            known.settled or (known.followed is not None and not self._follows(known.followed))
            for known in self._passes.values()
        )

    @property
    def held_bytes(self) -> int | None:
        """What the first pass that followed the plan held for backward, counted; None before."""
        reports = [known.report for known in self._passes.values() if known.report is not None]
        return reports[-1].held_bytes if reports else None

    @property
    def promise(self) -> SavePromise | None:
        """Peak and time of a step with the latest plan; None before a pass was recorded. It becomes
        better when the recorded step's backward has run, when more steps have been timed, and when
        the plan's own steps were."""
        recorded = [known for known in self._passes.values() if known.record is not None]
        if not recorded:
            return None
        self._make_plan(recorded[-1])
        planned, step_ns = recorded[-1].planned, self._watch.plain_ns(recorded[-1].key)
        added = recorded[-1].added
        return None if planned is None else promise(planned, step_ns=step_ns, added=added)

    @property
    def measured_step_ns(self) -> int | None:
        """What steps with the latest plan take, the median; None before there were two."""
        followed = [known for known in self._passes.values() if known.report is not None]
        return self._watch.typical_ns(followed[-1].key, FOLLOWED) if followed else None

    def remove(self) -> None:
        self._end_interrupted()
        self._detach()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inner.keep_on(set(), set())

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
        if known.peaks is not None:
            known.peaks.end()
        self._make_plan(known)
        # A pinned plan waits for nothing and decides by host facts: a graph can hold it.
        if is_capturing() and not known.counted:
            self._note(
                "a CUDA graph was captured before the plan was active, so everything stays "
                "saved in it. Run a few steps before the capture"
            )
            return
        if self._watches(known) and (part := compiled_part(self._model)) is not None:
            self._stop(COMPILED_PART.format(part=part))
            return
        known.seen += 1
        self._watch.begins(known.key, device_of(self._model))
        self._act(known)

    def _act(self, known: KnownPass) -> None:
        """Record the pass, or follow the plan in it."""
        active: StepRecorder | PlanFollower
        unpack: Any = unpack_held
        if known.followed is None and known.seen > self._plain_passes():
            active = self._recorder(known)
            unpack = functools.partial(known.unpack_recorded, active)
            self._watch.is_of(RECORDED)
        elif known.followed is not None and self._follows(known.followed):
            active = self._follower(known, known.followed)
            self._watch.is_of(FOLLOWED)
        else:
            return
        self._active, self._current, self._stack = active, known, ExitStack()
        if isinstance(active, PinnedFollower):
            self._stack.callback(active.stop)
            active.start()
            return
        if isinstance(active, (StepRecorder, PinningFollower)):
            self._stack.callback(active.detach)
        hooks = torch.autograd.graph.saved_tensors_hooks(active.pack, unpack)
        self._stack.enter_context(hooks)
        self._stack.enter_context(active)

    def _recorder(self, known: KnownPass) -> StepRecorder:
        return StepRecorder(
            self._model, lossy=self._lossy, heavy=self._target.heavy, node_ran=known.node_ran
        )

    def _watches(self, known: KnownPass) -> bool:
        """Whether operators pass through Python now, which compiled code cannot."""
        if known.followed is None:
            return known.seen >= self._plain_passes()
        return known.pinned is None or bool(known.pinned.dispatched)

    def _plain_passes(self) -> int:
        """Before the recorded one."""
        timed = self._target.max_slowdown is not None and self._watch.device.type != "cpu"
        return max(self._warmup, LEAST_PLAIN) if timed else self._warmup

    def _end_interrupted(self) -> None:
        """Ctrl-C ends a pass without torch calling any hook."""
        if self._caller is not None and not is_running(self._caller):
            self._depth = 1
            self._end(None, failed=True)

    def _follower(self, known: KnownPass, followed: FollowedPlan) -> PlanFollower:
        if known.pinned is not None:
            count = not known.counted
            return PinnedFollower(known.pinned, self._owned() if count else _NOTHING, count=count)
        if known.must_watch:
            return PlanFollower(followed, _NOTHING, count=False)
        return PinningFollower(followed, self._owned(), self._model)

    def _end(self, output: Any, *, failed: bool = False) -> None:
        if self.ended is not None:
            return
        self._depth -= 1
        if self._depth:
            return
        active, known, stack = self._active, self._current, self._stack
        self._active = self._current = self._stack = self._caller = self._handled = None
        if stack is None:
            return
        stack.close()
        try:
            if known is not None and not failed:
                self._end_whole(known, active, output)
        finally:
            if isinstance(active, PinningFollower):
                active.forget()

    def _end_whole(self, known: KnownPass, active: Any, output: Any) -> None:
        if isinstance(active, PlanFollower):
            self._end_followed(known, active)
            return
        if active.failure is not None:
            raise active.failure
        record = active.finish(output)
        if ran_compiled_code(record):
            self._stop(COMPILED_PART.format(part="a function that it calls"))
            return
        parameters = list(self._model.parameters())
        known.record = completed(record, known.key, self._watch, self._target, parameters)
        known.peaks = BackwardPeaks(self._watch.device)

    def _end_followed(self, known: KnownPass, active: PlanFollower) -> None:
        report = active.finish(_NOTHING if known.counted else self._owned())
        if report.failure is not None:
            raise report.failure
        for note in known.saw(report, pinned=isinstance(active, PinnedFollower)):
            self._note(note)
        if report.uncaptured:
            self._note(
                "a CUDA graph was captured. What is planned as "
                f"{', '.join(sorted(report.uncaptured))} stays saved in it, because it needs "
                "the CPU or its size varies from step to step"
            )
        if report.deviation is not None:
            return
        if isinstance(active, PinningFollower):
            self._pin(known, active, report)
        elif not known.counted:
            known.report, known.counted = report, True
        known.followed_passes += 1
        if known.is_due and not is_capturing():
            before = known.planned
            said = check_steps(known, self._watch, self._target)
            if known.planned is not before:
                self._watch.forget_followed()
                self._latest = known.planned.plan if known.planned is not None else None
            if said is not None:
                self._note(said)

    def _make_plan(self, known: KnownPass) -> None:
        before = known.planned
        known.make_plan(self._target)
        if known.planned is not None and known.planned is not before:
            self._latest = known.planned.plan

    def _pin(self, known: KnownPass, active: PinningFollower, report: PassReport) -> None:
        """Operators that later passes cannot recognise are planned as kept. Only where the target
        is missed without them, every operator stays watched."""
        pinned = pin_plan(active)
        if pinned.lost and known.record is not None:
            known.record = without_repeating(known.record, pinned.lost)
            other = plan_step(known.record, self._target)
            met = known.planned is not None and known.planned.meets_target
            if met and not other.meets_target:
                known.must_watch, known.counted, known.report = True, True, report
                self._note(
                    "some operators cannot be recognized by what they save, so all are watched"
                )
            else:
                known.use(other)
                self._latest = other.plan
            return
        known.pinned, known.report = pinned, report
        if self._target.max_slowdown is not None and not known.decided:
            COPY_WAITS.begin()  # of the passes that follow
        plans = [one.pinned for one in self._passes.values() if one.pinned is not None]
        self._inner.keep_on(
            set().union(*(plan.entered_modules() for plan in plans)),
            set().union(*(plan.left_modules() for plan in plans)),
        )

    def _enters_inner(self, module: Any, args: Any) -> None:
        del args
        if isinstance(self._active, PinnedFollower):
            try:
                self._active.enter_module(module)
            except Exception as error:  # the training goes on without us
                self._active.fails(error)

    def _leaves_inner(self, module: Any, args: Any, output: Any = None) -> None:
        del args
        if isinstance(self._active, PinnedFollower):
            try:
                self._active.leave_module(module, output)
            except Exception as error:  # the training goes on without us
                self._active.fails(error)

    def _known(self, inputs: Any) -> KnownPass | None:
        key = pass_key(self._model, inputs)
        known = self._passes.get(key)
        if known is None and len(self._passes) >= _MOST_PLANS:
            self._note(
                f"there are more than {_MOST_PLANS} kinds of input shapes. The others save "
                "everything. Pad batches to fewer shapes"
            )
            return None
        if known is None:
            known = self._passes[key] = KnownPass(key=key, followed=self._plan_for_another())
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
        if other_hooks_are_active() or is_following():
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


# What a plan promises: peak memory and time of a step, with intervals.
#
# The allocator's readings of the recorded pass's backward hold everything that is there anyway:
# weights, gradients, the batch, outputs, the loss. The plan changes only what is kept and made
# again.

_GUESSED_DOUBT = 0.30  # of a step that was worked out from its forward pass
_STEP_DOUBT = 0.03  # of a measured one


@dataclass(frozen=True, slots=True)
class _Spread:
    """What was measured, over what was promised."""

    peak: tuple[float, float]
    extra: tuple[float, float]  # of what recomputing and encoding add to a step


# On CPUs: benchmarks/measured/save_memory_residuals_cpu.json, the range of eight trainings.
_ON_CPU = _Spread(peak=(0.99, 1.04), extra=(0.95, 1.71))
# On GPUs: benchmarks/measured/save_memory_h200.json, plans for 5%. Unread ones are a guess.
_READ = _Spread(peak=(0.96, 1.04), extra=(0.5, 1.6))  # the recorded step's backward was read
_UNREAD = _Spread(peak=(0.90, 1.10), extra=(0.5, 1.6))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePromise:
    """Of one step with the plan. Peaks are of the whole step if `whole_step`, else of what backward
    keeps; times are of a step if `measured_step`, else worked out from the forward pass. Once the
    plan was tried (`tried_step`), the step is what its first steps took, and `planned_step_ns` what
    was planned before."""

    peak_bytes_before: int
    peak_bytes: int
    peak_low_bytes: int
    peak_high_bytes: int
    step_ns_before: int
    step_ns: int
    step_low_ns: int
    step_high_ns: int
    whole_step: bool
    measured_step: bool
    planned_step_ns: int = 0
    tried_step: bool = False

    def __str__(self) -> str:
        of = "The step's peak" if self.whole_step else "The peak of what is saved for backward"
        slower = percent(self.step_ns / max(1, self.step_ns_before) - 1)
        return (
            f"{of} goes from {size(self.peak_bytes_before)} to {size(self.peak_bytes)} "
            f"({size(self.peak_low_bytes)} to {size(self.peak_high_bytes)}). A step takes "
            f"{duration(self.step_ns)} instead of {duration(self.step_ns_before)}, {slower} "
            f"more ({duration(self.step_low_ns)} to {duration(self.step_high_ns)})."
        )


def promise(
    planned: PlannedStep, *, step_ns: int | None = None, added: AddedTime | None = None
) -> SavePromise:
    """`step_ns` is what a step without the plan took; `added` what the plan's own steps took over
    that, when it was tried."""
    plan = planned.plan
    before, after, spread = _peaks(planned)
    least = plan.saved_bytes if plan.step_peak_bytes is None else 0
    base_ns = step_ns or plan.step_ns
    planned_ns, low_ns, high_ns = _planned_step(planned, spread, step_ns)
    tried_ns = planned_ns
    if added is not None:
        base_ns, tried_ns = added.plain_ns, added.followed_ns
        doubt_ns = max(added.doubt_ns, _STEP_DOUBT * tried_ns)
        low_ns, high_ns = tried_ns - doubt_ns, tried_ns + doubt_ns
    return SavePromise(
        peak_bytes_before=before,
        peak_bytes=after,
        peak_low_bytes=max(least, round(after * spread.peak[0])),
        peak_high_bytes=round(after * spread.peak[1]),
        step_ns_before=base_ns,
        step_ns=tried_ns,
        step_low_ns=round(low_ns),
        step_high_ns=round(high_ns),
        whole_step=plan.step_peak_bytes is not None,
        measured_step=step_ns is not None or added is not None,
        planned_step_ns=planned_ns,
        tried_step=added is not None,
    )


def _planned_step(
    planned: PlannedStep, spread: _Spread, step_ns: int | None
) -> tuple[int, float, float]:
    """With its interval. The host may need longer than the device: more than its slack."""
    plan = planned.plan
    base_ns = step_ns or plan.step_ns
    doubt = _STEP_DOUBT if step_ns else _GUESSED_DOUBT
    extra_ns = max(plan.extra_ns, planned.host_late_ns)
    return (
        base_ns + extra_ns,
        base_ns * (1 - doubt) + spread.extra[0] * plan.extra_ns,
        base_ns * (1 + doubt) + spread.extra[1] * extra_ns,
    )


def _peaks(planned: PlannedStep) -> tuple[int, int, _Spread]:
    """Without and with the plan, and how far the latter may be off."""
    plan = planned.plan
    if plan.step_peak_bytes is None or plan.step_peak_bytes_before is None:
        return plan.peak_bytes_before, plan.peak_bytes, _ON_CPU
    spread = _READ if planned.read else _UNREAD
    return plan.step_peak_bytes_before, plan.step_peak_bytes, spread


# Hooks on inner modules: on those that plans ask about now, and on no others.


class ModuleHooks:
    """Torch calls a module without hooks in less time: what earlier plans needed is taken away."""

    def __init__(self, enters: Callable[..., None], leaves: Callable[..., None]) -> None:
        self._enters = enters
        self._leaves = leaves
        self._on_entry: dict[torch.nn.Module, Any] = {}
        self._on_exit: dict[torch.nn.Module, Any] = {}

    def keep_on(self, entered: set[torch.nn.Module], left: set[torch.nn.Module]) -> None:
        """Whether `enters` and `leaves` are called for a module."""
        for unneeded in self._on_entry.keys() - entered:
            self._on_entry.pop(unneeded).remove()
        for unneeded in self._on_exit.keys() - left:
            self._on_exit.pop(unneeded).remove()
        for module in entered - self._on_entry.keys():
            handle = module.register_forward_pre_hook(self._enters, prepend=True)
            self._on_entry[module] = handle
        for module in left - self._on_exit.keys():
            handle = module.register_forward_hook(self._leaves, always_call=True)
            self._on_exit[module] = handle


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


def ran_compiled_code(record: StepRecord) -> bool:
    """Also of a compiled function that no module shows."""
    return any(use.consumer.startswith(_COMPILED_NODE) for use in record.uses)
