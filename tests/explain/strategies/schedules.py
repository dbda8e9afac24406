"""When every stage of a pipeline computes, by simulation: the truth that captures are held to."""

from __future__ import annotations

from typing import Literal

Action = tuple[Literal["F", "B"], int]


def order_of(schedule: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    """What a stage does, as torch.distributed.pipelining orders it."""
    forwards: list[Action] = [("F", i) for i in range(microbatches)]
    backwards: list[Action] = [("B", i) for i in range(microbatches)]
    if schedule == "ScheduleGPipe":
        return forwards + backwards
    ahead = min(microbatches, stages - stage)
    turns = [each for pair in zip(backwards, forwards[ahead:], strict=False) for each in pair]
    return forwards[:ahead] + turns + backwards[microbatches - ahead :]


def simulate(
    schedule: str, microbatches: int, forward_ms: list[float], backward_ms: list[float]
) -> tuple[float, list[float]]:
    """The step in ms, and the share of it without compute of each stage; messages take no time."""
    stages = len(forward_ms)
    orders = [order_of(schedule, stage, stages, microbatches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * stages
    places = [0] * stages
    while any(places[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                what, batch = orders[stage][places[stage]]
                before = stage - 1 if what == "F" else stage + 1
                came = 0.0 if before in (-1, stages) else done.get((what, before, batch))
                if came is None:
                    break
                cost = forward_ms[stage] if what == "F" else backward_ms[stage]
                clock[stage] = max(clock[stage], came) + cost
                done[what, stage, batch] = clock[stage]
                places[stage] += 1
    step = max(clock)
    own = [microbatches * (f + b) for f, b in zip(forward_ms, backward_ms, strict=True)]
    return step, [1 - each / step for each in own]
