"""As many threads per operator as a rank has cores, or half as many.

Cores that share their arithmetic units in pairs (SMT) often train faster with half. How work is
split decides the order of sums: results are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepscope.fix.cores import cores_per_rank, share_of_cores
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_ALL, _HALF = "cores", "half"
_OMP, _MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


def _number(value: str, cores: int) -> int:
    if value.isdecimal():
        return int(value)
    return cores if value == _ALL else max(1, cores // 2)


def _number_here(facts: ScriptFacts, value: str) -> int:
    cores = share_of_cores(facts.cores, facts.machine_cores, facts.local_ranks)
    return _number(value, cores)


def fits(facts: ScriptFacts, value: str) -> str | None:
    number = _number_here(facts, value)
    if number == 1 and not value.isdecimal():
        return "a rank has one core, so one-thread does the same"
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.threads == number:
        return f"operators already use {number} {'thread' if number == 1 else 'threads'}"
    return None


def environment(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    """Only a number is known before the ranks are: the rest is set in the process."""
    return _variables_for(int(value), variables) if value.isdecimal() else {}


def _variables_for(number: int, users: Mapping[str, str]) -> dict[str, str | None]:
    """MKL's own variable would win over OpenMP's: it is changed where the user has set it."""
    names = (_OMP, _MKL) if users.get(_MKL) else (_OMP,)
    return dict.fromkeys(names, str(number))


def apply(training: TrainingProcess, value: str) -> None:
    """Now, and again at the first forward: the script may set threads itself, and only then is it
    known how many ranks there are."""
    import torch

    tell = training.telling()
    set_threads: Any = torch._C.set_num_threads  # torch's own: nobody watches it

    def switch(_module: Any = None) -> None:
        before, wanted = torch.get_num_threads(), _number(value, cores_per_rank())
        if before != wanted:
            set_threads(wanted)
        if before != wanted or _module is not None:
            tell(f"{wanted} {'thread' if wanted == 1 else 'threads'} per operator")

    switch()
    training.when_root(switch)


def patch(script: Script, value: str) -> Proposal:
    """The script's own call wins over variables: where there is one, it is changed."""
    facts = script.facts
    number = _number_here(facts, value)
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
    changes = _variables_for(number, facts.variables)
    return Proposal(variables={name: str(value) for name, value in changes.items()})


FIX = Fix(
    id="threads",
    effect=Effect.ROUNDING,
    family="threads",
    values=(_ALL, _HALF),
    accepts=lambda value: value in (_ALL, _HALF) or (value.isdecimal() and int(value) > 0),
    fits=fits,
    apply=apply,
    environment=environment,
    patch=patch,
)
