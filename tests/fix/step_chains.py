"""Steps that are one chain of operators, for plans that are checked by hand."""

from __future__ import annotations

from stepscope.fix.saved.step_record import RecordedCall, SavedUse, StepRecord, StepValue


def chain(
    sizes: list[int], refusals: list[str | None], saved: list[int], took_ns: int = 10
) -> StepRecord:
    """Operator n makes value n + 1 of value n; value 0 is the batch. Each takes `took_ns`."""
    values = [
        StepValue(
            storage=number,
            size_bytes=size_bytes,
            shape=(size_bytes,),
            dtype="uint8",
            module="",
            producer=number - 1 if number else None,
            owned=False,
            overwritten=False,
        )
        for number, size_bytes in enumerate(sizes)
    ]
    operators = [
        RecordedCall(
            name=f"op{number}",
            inputs=(number,),
            outputs=(number + 1,),
            took_ns=took_ns,
            refusal=refusal,
        )
        for number, refusal in enumerate(refusals)
    ]
    uses = [
        SavedUse(
            value=value,
            after=value,
            shape=(sizes[value],),
            dtype="uint8",
            consumer="",
            order=value,
        )
        for value in saved
    ]
    return StepRecord(operators=tuple(operators), values=tuple(values), uses=tuple(uses))
