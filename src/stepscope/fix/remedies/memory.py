"""Less kept for backward: checkpointed blocks, and what fix/saved recomputes or encodes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Fix, first_reason
from stepscope.fix.model_structure import checkpoint_switch, find_blocks
from stepscope.fix.proposal import (
    Proposal,
    Script,
    add_before_training,
    import_where_edited,
    submodule,
)
from stepscope.records.change_values import MemoryTarget, read_target
from stepscope.records.memory import SAVING_FILE
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.saved import MemorySaver
    from stepscope.fix.training_process import TrainingProcess


_TWICE = "the blocks update running statistics, which would count each batch twice"


def _why_not_activation_checkpointing(facts: ScriptFacts, value: str) -> str | None:
    return first_reason(
        (facts.blocks is None, "the model has no repeated blocks"),
        (facts.checkpointed, "the script checkpoints its blocks already"),
        (facts.block_statistics, _TWICE),
    )


def _apply_activation_checkpointing(training: TrainingProcess, value: str) -> None:
    tell = training.telling()

    def change(model: Any) -> None:
        blocks = find_blocks(model)
        if blocks is None:
            return
        if blocks.update_statistics:
            raise RefusedError(_TWICE)
        switch = checkpoint_switch(model)
        if switch is not None:
            model.get_submodule(switch).gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            tell(f"{type(model).__name__}: gradient_checkpointing_enable()")
            return
        from torch.utils.checkpoint import checkpoint

        for block in blocks.modules:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        tell(f"{len(blocks.modules)} blocks of type {blocks.type} recompute their activations")

    training.when_root(change)


def _patch_activation_checkpointing(script: Script, value: str) -> Proposal:
    facts = script.facts
    if facts.blocks is None:
        return Proposal()
    if facts.checkpoint_switch is not None:
        path = facts.checkpoint_switch
        enable = (
            'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        )
        return add_before_training(
            script,
            lambda name, _call: (f"{submodule(name, path)}.{enable}",),
            only=facts.block_root,
        )
    kind, _count = facts.blocks
    proposal = add_before_training(
        script,
        lambda name, _call: (
            f"for block in {submodule(name, facts.block_list)}.children():",
            f'    if type(block).__name__ == "{kind}":',
            "        block.forward = functools.partial(",
            "            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False",
            "        )",
        ),
        only=facts.block_root,
    )
    return import_where_edited(script, proposal, "functools", "torch.utils.checkpoint")


ACTIVATION_CHECKPOINTING = Fix(
    fits=_why_not_activation_checkpointing,
    apply=_apply_activation_checkpointing,
    patch=_patch_activation_checkpointing,
)


# Less is kept for backward: what is cheap is computed again, masks are kept as bits (fix/saved).
#
# Values are targets as records/change_values.py reads them: max, 5%, 0.5, 12GB, 2x.

_COMPILED = (
    "the script compiles its model, and the compiler already frees what is free to recompute. "
    "Call stepscope.fix.save_memory(model) in the script before its first step to free more"
)


def _why_not_save_memory(facts: ScriptFacts, value: str) -> str | None:
    checkpointed = "the script already checkpoints its blocks, which then save little else"
    return first_reason(
        (facts.compiled, _COMPILED),
        (facts.checkpointed, checkpointed),
        (not facts.roots, "stepscope saw no call of a model"),
    )


def _apply_save_memory(training: TrainingProcess, value: str) -> None:
    target = read_target(value)
    tell, leave_alone = training.telling(), training.leaving_alone()
    savers: list[MemorySaver] = []
    waiting: list[MemorySaver] = []  # for a plan

    def attach(root: Any) -> None:
        from stepscope.errors import UsageError
        from stepscope.fix.saved import save_memory

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
    training.leave_file(SAVING_FILE, lambda: _saving_content(savers))


# Passes before the recorded one: enough to know how long a step takes.
_WARM_UP = 3


def _saving_content(savers: list[MemorySaver]) -> dict[str, Any] | None:
    """Of the model that kept most."""
    from stepscope.fix.saved.attach import saving_content

    planned = [saver for saver in savers if saver.plan is not None]
    if not planned:
        return None
    return saving_content(
        max(planned, key=lambda saver: saver.plan.saved_bytes_before if saver.plan else 0)
    )


def _patch_save_memory(script: Script, value: str) -> Proposal:
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


def _is_target(value: str) -> bool:
    try:
        read_target(value)
    except ValueError:
        return False
    return True


SAVE_MEMORY = Fix(
    fits=_why_not_save_memory,
    apply=_apply_save_memory,
    patch=_patch_save_memory,
    accepts=_is_target,
)
