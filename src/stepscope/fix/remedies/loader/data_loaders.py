"""The DataLoaders that feed the training, and how a remedy gives them an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

NO_LOADER = "no DataLoader feeds the training"
_POSITIONS = {"num_workers": 5, "pin_memory": 7}
_IN_TRAINER = {
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
}


def training_loaders(facts: ScriptFacts) -> list[Built]:
    return [built for built in facts.of_kind("loader") if built.trains]


def with_workers(facts: ScriptFacts) -> list[Built] | str:
    """The training's DataLoaders that have workers, or why there is none."""
    loaders = training_loaders(facts)
    if not loaders:
        return NO_LOADER
    having = [built for built in loaders if built.options.get("num_workers")]
    return having or "the DataLoader has no workers"


def set_in_loaders(
    training: TrainingProcess,
    argument: str,
    value: Any,
    why_not: Callable[[Made], str | None] | None = None,
) -> None:
    """Give every DataLoader an argument; `why_not` says why one cannot have it."""
    tell, leave_alone = training.telling(), training.leaving_alone()

    def change(made: Made) -> None:
        if made.value(argument) == value:
            return
        why = why_not(made) if why_not is not None else None
        if why is not None:
            leave_alone(why)
            return
        made.arguments[argument] = value
        tell(f"{made.name}: {argument}={value}")

    training.before_building("loader", change)


def set_for_workers(training: TrainingProcess, argument: str, value: Any) -> None:
    """Give an argument that torch refuses without workers."""

    def why_not(made: Made) -> str | None:
        return None if made.value("num_workers") else f"{made.name} has no workers"

    set_in_loaders(training, argument, value, why_not)


def patch_loaders(
    script: Script,
    argument: str,
    value: str,
    where: Callable[[Built], bool] | None = None,
) -> Proposal:
    option = _IN_TRAINER[argument]
    trainer = f"give TrainingArguments {option}={value}: the Trainer builds the DataLoader"
    return set_arguments(
        script,
        "loader",
        {argument: value},
        positions=_POSITIONS,
        where=where,
        in_libraries={"transformers": trainer},
    )
