"""The repeated blocks of a model compute their activations again in backward, instead of keeping
them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.model_structure import checkpoint_switch, find_blocks
from stepscope.fix.proposal import (
    Proposal,
    Script,
    add_before_training,
    import_where_edited,
    submodule,
)
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_TWICE = "the blocks update running statistics, which would count each batch twice"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.blocks is None:
        return "the model has no repeated blocks"
    if facts.checkpointed:
        return "the script checkpoints its blocks already"
    if facts.block_statistics:
        return _TWICE
    return None


def apply(training: TrainingProcess, value: str) -> None:
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
        _checkpoint(blocks.modules)
        tell(f"{len(blocks.modules)} blocks of type {blocks.type} recompute their activations")

    training.when_root(change)


def _checkpoint(blocks: tuple[Any, ...]) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def patch(script: Script, value: str) -> Proposal:
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


FIX = Fix(
    id="activation-checkpointing",
    effect=Effect.BIT_IDENTICAL,
    fits=fits,
    apply=apply,
    patch=patch,
    saves="memory",
)
