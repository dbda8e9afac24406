"""Remedies are one closed set: nothing offers one that is not in it, and none is left over."""

from __future__ import annotations

import re
from pathlib import Path

import stepscope
from stepscope.predict.whatifs import remedy_ids
from stepscope.records import remedies
from stepscope.records.remedies import REMEDIES, RESERVED, KnownRemedy
from stepscope.records.run import AppliedRemedy, RunOrigin, join_ranks
from stepscope.ui.words import applied_line

SOURCE = Path(stepscope.__file__).parent
OFFER = re.compile(r"\bremedies\.([A-Z][A-Z0-9_]+)\b")


def offered() -> set[str]:
    names = {name for file in SOURCE.rglob("*.py") for name in OFFER.findall(file.read_text())} - {
        "REMEDIES",
        "RESERVED",
    }
    return {getattr(remedies, name).id for name in names}


def test_findings_take_their_remedies_from_the_set() -> None:
    """`Remedy(...)` is called in one place only: KnownRemedy.offer."""
    makers = [
        file.name
        for file in SOURCE.rglob("*.py")
        if re.search(r"(?<!class )\bRemedy\(", file.read_text())
    ]
    assert makers == ["remedies.py"]


def test_every_remedy_is_offered_by_a_finding_or_reserved() -> None:
    assert offered() | RESERVED == REMEDIES.keys()
    assert not offered() & RESERVED


def test_a_remedys_constant_is_named_after_its_id() -> None:
    constants = {
        name: value for name, value in vars(remedies).items() if isinstance(value, KnownRemedy)
    }
    assert {value.id for value in constants.values()} == REMEDIES.keys()
    for name, remedy in constants.items():
        assert name == remedy.id.replace("-", "_").upper()
        assert REMEDIES[remedy.id] is remedy
        assert remedy.action[0].isupper()
        assert not remedy.action.endswith(".")


def test_a_finding_may_say_the_action_in_its_own_words() -> None:
    assert remedies.COMPILE.offer().summary == remedies.COMPILE.action
    fitted = remedies.COMPILE.offer("torch.compile fuses small kernels")
    assert (fitted.id, fitted.summary) == ("compile", "torch.compile fuses small kernels")


def test_what_ifs_stand_for_remedies_of_the_set() -> None:
    assert remedy_ids() <= REMEDIES.keys()


# What became of a remedy in all ranks of a run.

DID = AppliedRemedy(id="bf16", did=["autocast in forward"])
REFUSED = AppliedRemedy(id="bf16", refused="it needs a CUDA device")
IDLE = AppliedRemedy(id="bf16")


def joined(*ranks: AppliedRemedy) -> str:
    (remedy,) = join_ranks(["bf16"], [[rank] for rank in ranks])
    return remedy.words


def test_each_outcome_has_its_words() -> None:
    assert joined(DID, DID) == "bf16"
    assert joined(DID, IDLE, IDLE) == "bf16 in 1 of 3 ranks"
    assert joined(REFUSED, IDLE) == "bf16 was refused: it needs a CUDA device"
    assert joined(IDLE, IDLE) == "bf16 found nothing to change"


def test_a_remedy_that_no_rank_speaks_of_is_not_called_applied() -> None:
    (remedy,) = join_ranks(["bf16"], [[], []])
    assert remedy.outcome == "unknown"
    assert remedy.words == "bf16 (no rank tells whether it was applied)"


def test_a_remedy_of_the_ranks_alone_is_listed_too() -> None:
    assert [remedy.id for remedy in join_ranks([], [[DID]])] == ["bf16"]


def test_one_line_has_what_was_applied_first() -> None:
    tf32 = AppliedRemedy(id="tf32", refused="it needs a CUDA device")
    fused = AppliedRemedy(id="fused-optimizer", did=["AdamW: fused=True"])
    remedies = join_ranks(["tf32", "bf16", "fused-optimizer"], [[tf32, DID, fused]])
    line = applied_line(RunOrigin(remedies=tuple(remedies)))
    assert line == "bf16, fused-optimizer; tf32 was refused: it needs a CUDA device"
    assert applied_line(RunOrigin()) == applied_line(None) == ""
