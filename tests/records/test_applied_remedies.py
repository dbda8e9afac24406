"""What became of a remedy in all ranks of a run."""

from __future__ import annotations

from stepscope.records.run import AppliedRemedy, RunOrigin, join_ranks
from stepscope.ui.words import applied_line

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
