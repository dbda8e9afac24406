"""Less is kept for backward: what is cheap is computed again, masks are kept as bits (fix/saved).

Values are targets as records/change_values.py reads them: max, 5%, 0.5, 12GB, 2x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, add_before_training
from stepscope.records.change_values import MemoryTarget, read_target
from stepscope.records.memory import SAVING_FILE
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.saved import MemorySaver
    from stepscope.fix.training_process import TrainingProcess

_COMPILED = (
    "the script compiles its model, and the compiler already frees what it can recompute. "
    "Set torch._functorch.config.activation_memory_budget to free more"
)


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.compiled:
        return _COMPILED
    if facts.checkpointed:
        return "the script already checkpoints its blocks, which then save little else"
    if not facts.roots:
        return "stepscope saw no call of a model"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    target = read_target(value)
    tell, leave_alone = training.telling(), training.leaving_alone()
    savers: list[MemorySaver] = []
    waiting: list[MemorySaver] = []  # for a plan

    def attach(root: Any) -> None:
        from stepscope.errors import UsageError
        from stepscope.fix.saved import save_memory
        from stepscope.fix.saved.attach import CompiledSaver

        try:
            saver = save_memory(
                root,
                reduce=target.reduce,
                budget=target.budget_bytes,
                max_slowdown=target.max_slowdown,
                batch=target.batch,
                heavy=target.heavy,
                warmup=_WARM_UP,
            )
        except UsageError as error:
            leave_alone(str(error))
            return
        if isinstance(saver, CompiledSaver):  # another remedy compiled it
            tell(saver.notes[0])
            return
        savers.append(saver)
        waiting.append(saver)

    def tell_plans(_optimizer: Any) -> None:
        for saver in [one for one in waiting if one.plan is not None or one.ended is not None]:
            waiting.remove(saver)
            plan = saver.plan
            if saver.ended is not None:
                leave_alone(saver.ended)
                continue
            if plan is None or not plan.changes_something():
                leave_alone(" ".join(plan.notes) if plan is not None else "")
            else:
                tell(plan.verdict())

    training.when_root(attach)
    training.after_step(tell_plans)
    training.leave_file(SAVING_FILE, lambda: _content(savers))


# Passes before the recorded one: enough to know how long a step takes.
_WARM_UP = 3


def _content(savers: list[MemorySaver]) -> dict[str, Any] | None:
    """Of the model that kept most."""
    from stepscope.fix.saved.attach import saving_content

    planned = [saver for saver in savers if saver.plan is not None]
    if not planned:
        return None
    return saving_content(
        max(planned, key=lambda saver: saver.plan.saved_bytes_before if saver.plan else 0)
    )


def patch(script: Script, value: str) -> Proposal:
    options = _options(read_target(value))

    def lines(name: str, call: Any) -> tuple[str, ...]:
        del call
        return (
            "from stepscope.fix import save_memory",
            f"save_memory({', '.join((name, *options))})",
        )

    return add_before_training(script, lines)


def _options(target: MemoryTarget) -> list[str]:
    """As one writes them in Python."""
    options = []
    if target.max_slowdown is not None:
        options.append(f"max_slowdown={target.max_slowdown:g}")
    if target.reduce is not None:
        options.append(f"reduce={target.reduce:g}")
    if target.budget_bytes is not None:
        options.append(f"budget={target.budget_bytes}")
    if target.batch is not None:
        options.append(f'batch="{target.batch:g}x"')
    if target.heavy:
        options.append("heavy=True")
    return [*options, f"warmup={_WARM_UP}"]


def _accepts(value: str) -> bool:
    try:
        read_target(value)
    except ValueError:
        return False
    return True


FIX = Fix(
    id="save-memory",
    effect=Effect.BIT_IDENTICAL,
    fits=fits,
    apply=apply,
    patch=patch,
    values=("5%", "15%"),
    accepts=_accepts,
    family="recompute",
    saves="memory",
)
