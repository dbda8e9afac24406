"""Run folders whose side files are damaged, hold odd values, or are no files."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from fuzz import drive as driving
from fuzz.odd_files import damage_bytes, damage_json, damage_lines, make_special
from fuzz.odd_json import odd_value
from fuzz.sound import check_numbers
from shared_traces import GOLDEN
from stepscope import StepscopeError
from stepscope.explain.engines import Here
from stepscope.explain.whole_run.live import explain_live
from stepscope.measure.settings import Settings
from stepscope.trace.discover import find_traces
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.trace.run_folder.rank_facts import read_facts
from stepscope.trace.run_folder.rank_folder import read_memory
from stepscope.ui.cli.top import live_json
from stepscope.ui.jobs.run_folder import count_events, describe_ranks, steps_seen
from stepscope.ui.terminal.comparison import print_comparison
from stepscope.ui.terminal.health import check_health, print_health
from stepscope.ui.terminal.live import live_lines
from stepscope.ui.topics.comparison import comparison_json
from stepscope.verify.compare import compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from stepscope.records.explanation import Explanation

_SEEDS = ("cpu-two-ranks", "h200-resnet18")
_SIDE = ("rank.json", "steps.jsonl", "memory.json", "clock.json", "comms.jsonl")
_WHOLE = ("run.json",)
_HOST = {"job": "torchrun", "place": 0, "places": 2, "host": "node0", "status": "running"}
_MOST_EVENTS = 700
_ODD_NAMES = ("rank-1", "rank-00007", "rank-", "rank-x", "rank-99999999999", "rank-00000.2")


@cache
def _trace(path: Path) -> bytes:
    """Small, so that many cases take little time: damage is beside it."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()), strict=False)
    events = found["traceEvents"]
    every = max(1, len(events) // _MOST_EVENTS)
    found["traceEvents"] = [
        event for place, event in enumerate(events) if _is_kept(event, place, every)
    ]
    return gzip.compress(json.dumps(found).encode(), 1)


def _is_kept(event: dict[str, Any], place: int, every: int) -> bool:
    """Steps, and what belongs together: a launch and its kernel."""
    if str(event.get("name")).startswith("ProfilerStep#"):
        return True
    belongs = event.get("args", {}).get("correlation", event.get("id", place))
    return not isinstance(belongs, int) or belongs % every == 0


def mutate(rng: Random, folder: Path) -> Path:
    run = folder / rng.choice(("run", "run", "run", "r un", os.fsdecode(b"\xff\xfe")))
    source = GOLDEN / rng.choice((_SEEDS[0], _SEEDS[0], _SEEDS[1]))
    for rank in sorted(source.glob("rank-*")):
        (run / rank.name).mkdir(parents=True)
        (run / rank.name / "trace.json.gz").write_bytes(_trace(rank / "trace.json.gz"))
        for name in _SIDE:
            if (rank / name).exists():
                shutil.copy(rank / name, run / rank.name)
    (run / "hosts").mkdir()
    (run / "hosts" / "00000.json").write_text(json.dumps(_HOST))
    for name in _WHOLE:
        if (source / name).exists():
            shutil.copy(source / name, run)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        files = [file for file in _files(run) if not file.name.startswith("trace.")]
        if files:
            rng.choice(_WAYS)(rng, rng.choice(files))
    return run


def _files(run: Path) -> list[Path]:
    """Without links: what they lead to is not ours to damage, and may have no end."""
    return sorted(file for file in run.rglob("*") if file.is_file() and not file.is_symlink())


def _bytes(rng: Random, file: Path) -> None:
    file.write_bytes(damage_bytes(rng, file.read_bytes()[: 1 << 20]))


def _values(rng: Random, file: Path) -> None:
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        way = damage_lines if file.suffix == ".jsonl" else damage_json
        file.write_bytes(way(rng, file.read_bytes()))


def _deep_value(rng: Random, file: Path) -> None:
    """One value of the innermost records, where most of what is read lies."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(file.read_bytes())
        at = value
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = rng.choice(keys)
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.1:
                at[key] = odd_value(rng)
                break
            at = at[key]
        file.write_bytes(json.dumps(value).encode())


def _special(rng: Random, file: Path) -> None:
    make_special(rng, file)


def _gone(rng: Random, file: Path) -> None:
    file.unlink()


def _of_another(rng: Random, file: Path) -> None:
    """A file under another's name, of another rank, or of both."""
    run = file.parent.parent if file.parent.name.startswith("rank-") else file.parent
    target = file.with_name(rng.choice((*_SIDE, *_WHOLE)))
    content = rng.choice(_files(run)).read_bytes()
    if target in _files(run) or not (target.is_symlink() or target.exists()):
        target.write_bytes(content)


def _renamed(rng: Random, file: Path) -> None:
    """A rank's folder under another name, or twice."""
    rank = file.parent
    if not rank.name.startswith("rank-"):
        return
    target = rank.with_name(rng.choice(_ODD_NAMES))
    if target.exists():
        return
    if rng.random() < 0.5:
        with contextlib.suppress(OSError):  # of pipes there is no copy
            shutil.copytree(rank, target, symlinks=True)
    else:
        rank.rename(target)


_WAYS: list[Callable[[Random, Path], None]] = [
    *(_bytes, _bytes, _values, _values, _values, _deep_value, _deep_value, _deep_value),
    *(_special, _gone, _of_another, _renamed),
]


def drive(path: Path, work: Path) -> str:
    """All that reads a run folder: explain, what-ifs, compare, health, top, and `run` itself."""
    _compare(path)
    _follow(path)
    count_events(path)
    for rank in path.glob("rank-*"):
        steps_seen(rank)
    json.dumps(describe_ranks(path, Settings(folder=str(path))))
    try:
        explanation = driving.explain(path, work)
    except StepscopeError as error:
        return driving.refused(error)
    driving.show(explanation)
    _health(path, explanation)
    for file in find_traces(path)[:1]:
        driving.change(file)
    return driving.ANSWERED


def _compare(path: Path) -> None:
    other = GOLDEN / _SEEDS[0]
    for sides in ((path, other), (other, path)):
        try:
            with patch("stepscope.explain.explain_job.Pool", Here):  # a worker has no workers
                found = compare(*([str(side)] for side in sides), explain=False, cache=False)
        except StepscopeError as error:
            driving.refused(error)
            continue
        check_numbers(driving.as_json(comparison_json(found)))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_comparison(found, top=6, report=None)
        check_numbers(printed.getvalue())


def _follow(path: Path) -> None:
    follower = RunFollower(path)
    first = explain_live(follower.read(), now=1.8e9)
    second = explain_live(follower.read(), now=1.8e9 + 1, before=first)
    for run in (first, second):
        check_numbers(driving.as_json(live_json(run)))
        check_numbers("\n".join(line.plain for line in live_lines(run, 80, 24)))


def _health(path: Path, explanation: Explanation) -> None:
    ranks = sorted(path.glob("rank-*"))
    found = check_health(
        explanation, [{**read_facts(rank), "memory": read_memory(rank)} for rank in ranks]
    )
    driving.as_json(found)
    with contextlib.redirect_stdout(io.StringIO()):
        print_health(found)
