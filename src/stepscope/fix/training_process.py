"""The process that trains, as remedies see it: what they may change, and when.

    def apply(training: TrainingProcess, value: str) -> None:
        training.before_building("optimizer", lambda made: made.arguments.update(fused=True))

Whatever a remedy does to the training it tells with `did`, so that a run says what was applied and
a remedy that found nothing to change is not taken for one that did not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stepscope.errors import RefusedError, TrainingStopped
from stepscope.fix.training_events import Builders, Clipping, Made, PassEvents, Roots

_MOST_DEEDS = 20


@dataclass(slots=True)
class Applied:
    """What became of one remedy in this process."""

    id: str
    did: list[str] = field(default_factory=list)
    refused: str | None = None
    left_alone: str | None = None  # why something was; the reason if nothing was changed at all

    def to_json(self) -> dict[str, Any]:
        refused = self.refused or (None if self.did else self.left_alone)
        return {"id": self.id, "did": self.did, "refused": refused}


class TrainingProcess:
    """Built once per process, when torch has just been imported.

    `when_imported(name, action)` acts once a module is loaded, now or later. `surrounds` marks a
    function so that torch.compile does not trace it.
    """

    def __init__(
        self,
        when_imported: Callable[[str, Callable[[Any], None]], None],
        surrounds: Callable[[Any], Any],
    ) -> None:
        self.when_imported, self.surrounds = when_imported, surrounds
        self._applied: list[Applied] = []
        self._current: Applied | None = None
        self._builders = Builders(when_imported, surrounds)
        self._passes = PassEvents(surrounds)
        self._roots = Roots(surrounds, self._passes)
        self._clipping = Clipping(when_imported, surrounds)
        self._files: dict[str, Callable[[], dict[str, Any] | None]] = {}

    # Called by remedies.

    def did(self, what: str) -> None:
        """Say what was changed, such as "AdamW: fused=True"; safe to call again and again."""
        self._tell(self._current, what)

    def telling(self) -> Callable[[str], None]:
        """`did` for actions that run later, when another remedy may be the current one."""
        applied = self._current
        return lambda what: self._tell(applied, what)

    def refusing(self) -> Callable[[str], None]:
        """For actions that run later: record why this remedy was not applied after all."""
        applied = self._current

        return lambda why: self._refuse(applied, why)

    def leaving_alone(self) -> Callable[[str], None]:
        """For actions that run later: record why one object among several was not changed."""
        applied = self._current

        def leave_alone(why: str) -> None:
            if applied is not None and applied.left_alone is None:
                applied.left_alone = why

        return leave_alone

    def leave_file(self, name: str, content: Callable[[], dict[str, Any] | None]) -> None:
        """In the rank's folder when the run ends; None leaves nothing."""
        self._files[name] = content

    def before_building(self, kind: str, change: Callable[[Made], None]) -> None:
        """Before an optimizer, a loader, ddp or a scaler is built: `change` may edit its
        arguments, by name. Kinds are those of building.KINDS."""
        self._builders.before(kind, self.guarded(change))

    def after_building(self, kind: str, act: Callable[[Made], None]) -> None:
        """`made.object` is the finished object then."""
        self._builders.after(kind, self.guarded(act))

    def when_root(self, act: Callable[[Any], None]) -> None:
        """With each module that the script itself calls to train, before its first forward.

        A root is the outermost module of a call with gradients that has parameters; DDP if the
        model is wrapped."""
        self._roots.when_found(self.guarded(act))

    def around_root(
        self, before: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None
    ) -> None:
        """Before every call of a root with gradients enabled: `before(module, args, kwargs)` may
        return changed (args, kwargs), or None. It runs outside anything that is compiled."""
        self._roots.before_call(None if before is None else self.guarded(before))

    @property
    def is_in_root(self) -> bool:
        """Whether a root that is called with gradients enabled has not returned yet."""
        return self._roots.is_running

    def before_backward(self, act: Callable[[Any], Any]) -> None:
        """With the tensors that a backward pass starts from, before it does; it may return others
        to start from instead, or None."""
        self._passes.before(self.guarded(act))

    def after_backward(self, act: Callable[[], None]) -> None:
        self._passes.after(self.guarded(act))

    def before_graph_is_freed(self, act: Callable[[Any], None]) -> None:
        """Before torch.autograd.grad, if it lets the graph go: no backward pass follows."""
        self._passes.before_graph_is_freed(self.guarded(act))

    def before_step(self, act: Callable[[Any], None]) -> None:
        """With the optimizer, before it steps."""
        self._passes.before_step(self.guarded(act))

    def before_step_call(self, act: Callable[[Sequence[Any], dict[str, Any]], None]) -> None:
        """With the arguments of optimizer.step(), before it steps."""
        self._passes.before_step_call(self.guarded(act))

    def before_clipping(self, act: Callable[[], None]) -> None:
        """Before a call of torch.nn.utils.clip_grad_*."""
        self._clipping.before(self.guarded(act))

    def after_step(self, act: Callable[[Any], None]) -> None:
        """With the optimizer, after it has stepped."""
        self._passes.after_step(self.guarded(act))

    # Called by whoever starts the process.

    @contextmanager
    def applying(self, name: str) -> Iterator[Applied]:
        """Meanwhile this remedy is applied: what it does is told under its name."""
        applied = self._current = Applied(name)
        self._applied.append(applied)
        try:
            yield applied
        finally:
            self._current = None

    def content(self) -> list[dict[str, Any]]:
        """For rank.json."""
        return [applied.to_json() for applied in self._applied]

    def files(self) -> dict[str, dict[str, Any]]:
        """What remedies leave in the rank's folder, by name."""
        contents = {name: make() for name, make in self._files.items()}
        return {name: content for name, content in contents.items() if content is not None}

    def guarded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """An action that runs later does not raise into the training: the remedy is refused.

        Only TrainingStopped passes: it ends the process."""
        applied = self._current

        def act_guarded(*args: Any) -> Any:
            try:
                return act(*args)
            except TrainingStopped as stop:
                self._refuse(applied, stop.why)
                raise
            except RefusedError as error:
                why = str(error)
            except Exception as error:
                why = f"a defect in stepscope: {type(error).__name__}: {error}"
            self._refuse(applied, why)
            return None

        return act_guarded

    @staticmethod
    def _refuse(applied: Applied | None, why: str) -> None:
        if applied is not None and applied.refused is None:
            applied.refused = why

    @staticmethod
    def _tell(applied: Applied | None, what: str) -> None:
        if applied is not None and what not in applied.did and len(applied.did) < _MOST_DEEDS:
            applied.did.append(what)
