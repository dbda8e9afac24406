"""Where torch's random numbers are: taken, and set again, for the host and every CUDA device."""

from __future__ import annotations

from typing import Any


def states_now() -> list[Any]:
    """The host's first, then each device's."""
    import torch

    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def restore(states: list[Any]) -> None:
    import torch

    torch.set_rng_state(states[0])
    for number, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, number)
