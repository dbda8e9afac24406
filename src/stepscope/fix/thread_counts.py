"""How many threads an operator may share its work with, as threads and one-thread set it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stepscope.fix.proposal import Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_OMP, _MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


def why_not_threads(facts: ScriptFacts, number: int) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.threads == number:
        return f"operators already use {number} {'thread' if number == 1 else 'threads'}"
    return None


def variables_for(number: int, users: Mapping[str, str]) -> dict[str, str | None]:
    """MKL's own variable would win over OpenMP's: it is changed where the user has set it."""
    names = (_OMP, _MKL) if users.get(_MKL) else (_OMP,)
    return dict.fromkeys(names, str(number))


def keep_threads(training: TrainingProcess, number: Callable[[], int]) -> None:
    """Now, and again at the first forward: the script may set threads itself, and only then is it
    known how many ranks there are."""
    import torch

    tell = training.telling()
    set_threads: Any = torch._C.set_num_threads  # torch's own: nobody watches it

    def switch(_module: Any = None) -> None:
        before, wanted = torch.get_num_threads(), number()
        if before != wanted:
            set_threads(wanted)
        if before != wanted or _module is not None:
            tell(f"{wanted} {'thread' if wanted == 1 else 'threads'} per operator")

    switch()
    training.when_root(switch)


def patch_threads(script: Script, number: int) -> Proposal:
    """The script's own call wins over variables: where there is one, it is changed."""
    facts = script.facts
    for frame in facts.set_threads[:1]:
        source = script.source(frame.file)
        call = source.call_at(frame.line, "set_num_threads") if source is not None else None
        if source is None or call is None or len(call.args) != 1:
            continue
        if source.called(call) == "set_num_threads":  # not a library's call that leads there
            return Proposal(edits=(source.replace(call.args[0], str(number)),))
    if facts.set_threads:
        where = facts.set_threads[0].words
        return Proposal(by_hand=(f"call torch.set_num_threads({number}) (see {where})",))
    changes = variables_for(number, facts.variables)
    return Proposal(variables={name: str(value) for name, value in changes.items()})
