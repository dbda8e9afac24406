"""Step lists, folders of `ab`, profiles and promises: what other verbs than explain read."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from fuzz.drive import ANSWERED, REFUSED
from fuzz.odd_files import damage_bytes, damage_json, damage_lines, make_special
from fuzz.odd_json import odd_value
from fuzz.sound import check_numbers
from stepscope import StepscopeError
from stepscope.records.folders import node_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

_STEPS = [10.0 + (7 * number % 13) / 10 for number in range(60)]
_ENDINGS = (".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
_CELLS = (
    *("-1", "0", "nan", "inf", "1e400", "1e-320", "1e15", "9" * 70, "9" * 5000, "abc", "", "1,5"),
    *("12 ms", "3us", "4 s", "0x10", "1_000", "٣", "½", "=1+1", '"', "'", "\x00", "#", "1;2", "µs"),
)


def mutate(rng: Random, folder: Path) -> Path:
    """One folder for each of the four; its name says which."""
    kind = rng.choice(("lists", "lists", "pairs", "profiles", "record"))
    made = folder / kind
    made.mkdir()
    _MAKERS[kind](rng, made)
    for file in sorted(made.iterdir()):
        pick = rng.random()
        if pick < 0.06:
            make_special(rng, file)
        elif pick < 0.35:
            file.write_bytes(damage_bytes(rng, file.read_bytes()))
        elif pick < 0.9:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                way = damage_json if file.suffix == ".json" else damage_lines
                file.write_bytes(way(rng, file.read_bytes()))
    return made


def _lists(rng: Random, folder: Path) -> None:
    for side in "ab":
        path = folder / (side + rng.choice(_ENDINGS))
        path.write_bytes(_list(rng, path.suffix).encode("utf-8", "replace"))


def _list(rng: Random, ending: str) -> str:
    cells: list[Any] = [
        rng.choice(_CELLS) if rng.random() < rng.choice((0.0, 0.0, 0.02, 0.5)) else step
        for step in _STEPS[: rng.choice((0, 1, 2, 10, 60))]
    ]
    name = rng.choice(("step_ms", "step_s", "step", "ms", "time", "", "step_ns"))
    if ending == ".json":
        value = rng.choice((cells, {name: cells}, [{name: cell} for cell in cells]))
        return json.dumps(value)
    if ending in (".jsonl", ".ndjson"):
        rows = cells if rng.random() < 0.3 else [{name: cell, "x": 1} for cell in cells]
        return "\n".join(map(json.dumps, rows))
    mark = rng.choice((",", ";", "\t"))
    if rng.random() < 0.5:
        return "\n".join([f"{name}{mark}note", *(f"{cell}{mark}x" for cell in cells)])
    return rng.choice(("\n", " ", ", ")).join(map(str, cells))


def _pairs(rng: Random, folder: Path) -> None:
    pairs = [{"a": f"a-{n:02}", "b": f"b-{n:02}", "first": "a", "done": n < 3} for n in range(4)]
    turns = {"command_a": ["x"], "command_b": ["y"], "pairs": pairs, "seed": 0, "schema": 1}
    (folder / "ab.json").write_text(json.dumps(turns))


def _profiles(rng: Random, folder: Path) -> None:
    segment = {"from_bytes": 1, "to_bytes": 1 << 20, "alpha_ns": 5e4, "beta_ns_per_byte": 0.5}
    size = {"size_bytes": 1024, "time_ns": 60_000, "low_ns": 50_000, "high_ns": 70_000}
    fit = {
        "kind": "all_reduce", "group": "world", "group_size": 2, "passes": 3, "noise": 0.05,
        "segments": [segment, segment | {"from_bytes": 1 << 20, "to_bytes": 1 << 30}],
        "measured": [size, size | {"size_bytes": 1 << 20}], "held_out": 0.1, "held_out_sizes": 0.2,
    }  # fmt: skip
    profile = {
        "schema": 1, "host": node_name(), "device": "CPU", "kind": "cpu", "torch": "2.13",
        "when_unix": 1.7e9, "world_size": 2, "backend": "gloo", "threads": 1,
        "matmul_flops": {"fp32": 1e11}, "copy_bytes_s": 1e10, "tiny_op_ns": 900.0,
        "spread": {"fp32": 0.02}, "not_offered": {"bf16": "none"}, "fits": [fit, fit],
        "contention": {"group_size": 2, "lost": 0.3, "beside": [segment]}, "other_cores": 0.1,
        "cores": 2.0, "rounds": 1,
    }  # fmt: skip
    for number in range(rng.choice((1, 2))):
        (folder / f"{number}.json").write_text(json.dumps(profile))


def _record(rng: Random, folder: Path) -> None:
    promise = {
        "kind": "promise", "id": "p1", "when_unix": 1.7e9, "host": node_name(),
        "settings": [{"name": "precision", "value": "bf16"}], "baseline_ms": 20.0,
        "predicted_ms": 16.0, "low_ms": 15.0, "high_ms": 17.0, "schema": 1, "path": "/x",
        "workload": {"script": "train.py", "world_size": 2, "device": None, "signature": "s"},
    }  # fmt: skip
    delivery = {
        "kind": "delivery", "promise": "p1", "when_unix": 1.8e9, "a_ms": 20.0, "b_ms": 16.5,
        "change": -0.17, "low": -0.2, "high": -0.1, "confidence": 0.95, "verdict": "faster",
        "named": True, "seen": ["precision"], "schema": 1,
    }  # fmt: skip
    forgotten = {"kind": "forgotten", "promise": "p2", "when_unix": 1.9e9, "schema": 1}
    more = [promise | {"id": f"p{number}", "when_unix": 1.7e9 + number} for number in range(2, 9)]
    rows = [promise, *more, delivery, delivery | {"promise": "p3"}, forgotten]
    if rng.random() < 0.3:
        rows.append({**rng.choice(rows), rng.choice(list(promise)): odd_value(rng)})
    (folder / "host.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


_MAKERS: dict[str, Callable[[Random, Path], None]] = {
    "lists": _lists,
    "pairs": _pairs,
    "profiles": _profiles,
    "record": _record,
}


def drive(path: Path, work: Path) -> str:
    """The verbs that read it, in the terminal's form, as JSON and as a report."""
    commands = {
        "lists": lambda: _compare(path, work),
        "pairs": lambda: [["compare", str(path)]],
        "profiles": lambda: [["calibrate", "--compare", "1MB"]],
        "record": lambda: [["record"], ["record", "forget", "p1"], ["record", "--every-host"]],
    }[path.name]()
    os.environ |= {"STEPSCOPE_PROFILES": str(path), "STEPSCOPE_RECORD": str(path)}
    answered = [_run([*command, *more]) for command in commands for more in ([], ["--json"])]
    return ANSWERED if any(answered) else REFUSED


def _compare(path: Path, work: Path) -> list[list[str]]:
    a, b = (str(file) for file in sorted(path.iterdir()))
    return [["compare", a, b, "--html", str(work / "compared.html")], ["compare", b, a]]


def _run(command: list[str]) -> bool:
    """Whether there was an answer; whatever is none of our errors goes on."""
    from stepscope.ui.cli.verbs import cli

    if command[:2] == ["record", "forget"] and "--json" in command:
        return True
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    if isinstance(done.exception, StepscopeError):
        check_numbers(str(done.exception))
        if type(done.exception) is StepscopeError:
            raise done.exception
        return False
    if done.exception is not None:
        raise done.exception
    check_numbers(done.output)
    if "--json" in command:
        check_numbers(json.loads(io.StringIO(done.stdout).read()))
    return True
