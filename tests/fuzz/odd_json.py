"""Odd values, and ways to put them into JSON that was fine."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

HUGE_NUMBERS = [2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30]
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    1e-9,
    0.5,
    -0.0,
    1e15,
    1e18,
    1e300,
    -1e308,
    1e-320,
    *HUGE_NUMBERS,
]
TEXTS = [
    *("", " ", "0", "-1", "12", "1.5", "1e999", "NaN", "inf", "null", "true", "0x1f", "x", "\0"),
    *("[1, 2]", "[]", "{}", "()", "aten::mm", "ncclDevKernel_AllReduce", "ProfilerStep#1", "é"),
    *("9" * 40, "9" * 5000, "[" * 3000, "a" * 20000, "\ud83d\ude00", "}, {", '"', "\\", "\u202e"),
    *("float", "c10::BFloat16", "long int", "Float", "GenericList", "ScalarList", "../../etc"),
]
STRUCTURES: list[Any] = [
    *([], [[]], [1], [-1], [2**62, 2**62], [0, 0], [[2**31] * 8], [[1] * 2000], ["x"], [None]),
    *({}, {"a": 1}, {"name": {}}, [{}], [[[[[[[[]]]]]]]], [1.5], [[1, "2"]], [True]),
]
VALUES: list[Any] = [None, True, False, *NUMBERS, *TEXTS, *STRUCTURES]

Place = tuple[Any, Any]  # a container, and the key or index in it


def odd_value(rng: Random) -> Any:
    """Any value, numbers of every size most often."""
    pick = rng.random()
    if pick < 0.4:
        return rng.choice(NUMBERS)
    if pick < 0.5:
        return rng.choice((1, -1)) * rng.getrandbits(rng.randrange(1, 80))
    return copy.deepcopy(rng.choice(VALUES))


def places(value: Any, out: list[Place] | None = None) -> list[Place]:
    """Every place in it that holds a value."""
    out = [] if out is None else out
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, held in inner:
        out.append((value, key))
        places(held, out)
    return out


def _replace(rng: Random, place: Place) -> None:
    place[0][place[1]] = odd_value(rng)


def _delete(rng: Random, place: Place) -> None:
    del place[0][place[1]]


def _wrap(rng: Random, place: Place) -> None:
    held = place[0][place[1]]
    place[0][place[1]] = rng.choice(([held], {"value": held}, str(held), [held] * 3))


def _nudge(rng: Random, place: Place) -> None:
    """A number a little or a lot off; anything else becomes odd."""
    held = place[0][place[1]]
    if isinstance(held, int | float) and not isinstance(held, bool):
        factor = rng.choice((-1, 0, 2, 10, 1000, 1e6, 1e12, 0.5))
        moved = held * factor if rng.random() < 0.5 else held + rng.choice((-1, 1, 1e6, -1e9))
        whole = isinstance(held, int) and abs(moved) < 1e300
        place[0][place[1]] = int(moved) if whole else moved
    else:
        _replace(rng, place)


def _rename(rng: Random, place: Place) -> None:
    container, key = place
    if isinstance(container, dict):
        container[rng.choice(("", "x", str(key).upper(), str(key) + " "))] = container.pop(key)
    else:
        container.insert(key, copy.deepcopy(container[key]))


def _swap(rng: Random, place: Place) -> None:
    """Two values of one container change places."""
    container, key = place
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    other = rng.choice(keys)
    container[key], container[other] = container[other], container[key]


_WAYS: list[Callable[[Random, Place], None]] = [
    _replace, _replace, _replace, _replace, _nudge, _nudge, _nudge, _delete, _wrap, _rename, _swap,
]  # fmt: skip


def damage(rng: Random, value: Any, times: int) -> Any:
    """A copy with some of its values odd, gone, doubled, renamed or wrapped."""
    value = copy.deepcopy(value)
    for _ in range(times):
        if found := places(value):
            rng.choice(_WAYS)(rng, rng.choice(found))
    return value


def text(value: Any) -> bytes:
    """As the standard library writes it: NaN and Infinity bare, lone surrogates escaped."""
    return json.dumps(value).encode()
