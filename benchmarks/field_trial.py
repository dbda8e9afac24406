"""One public script, run twice in fresh copies of its folder: bare, then under `stepscope run`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from process import environment, last_line

if TYPE_CHECKING:
    from field_scripts import Script

_EPOCH = -2  # as the counter writes it
COUNTER = Path(__file__).parent / "workloads" / "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result for one script; None is not known."""

    name: str
    problem: str | None = None  # why there is no trial; the other fields are then empty
    ranks: int = 1
    traced: bool = True  # whether a trace is expected
    own_steps: int | None = None  # the script's own count per rank
    counted_steps: tuple[int, ...] = ()  # independently, in the bare run, by process
    seen_steps: tuple[int, ...] = ()  # by stepscope, one number per rank folder
    bare_code: int | None = None
    captured_code: int | None = None
    same_losses: bool | None = None
    traces: int = 0  # rank folders with a trace
    verdict: str | None = None
    findings: tuple[str, ...] = ()
    step_ms: float | None = None  # of record, by stepscope
    bare_step_ms: float | None = None  # median, by our counter, in the bare run
    bare_s: float | None = None
    captured_s: float | None = None
    messages: tuple[str, ...] = ()  # stepscope's own lines on stderr

    @property
    def right(self) -> bool:
        """Every rank was captured with the right count of steps, and nothing else changed."""
        return (
            self.problem is None
            and self.own_steps is not None
            and len(self.seen_steps) == self.ranks
            and (self.traces == self.ranks or not self.traced)
            and set(self.seen_steps) == {self.own_steps}
            and self.bare_code == self.captured_code
            and self.same_losses is not False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int | None  # None: stopped at the time limit
    wall_s: float
    out: str
    err: str


class NoTrialError(Exception):
    """Why a script could not be tried."""


def try_script(script: Script, folder: Path, work: Path, *, again: bool = False) -> Trial:
    """Both runs; `folder` holds the repositories, `site` (packages) and `data`.

    `again` takes the bare run that an earlier call left in `work`: of the same row, and gone well.
    """
    home = work / script.name
    try:
        if missing := missing_file(script, folder):
            raise NoTrialError(f"not there: {missing}")
        bare = (_bare_before(script, home) if again else None) or _bare(script, folder, home)
        if bare.code is None:
            raise NoTrialError(f"bare, it ran over {script.timeout_s:.0f} s")
        if bare.code:
            raise NoTrialError(f"fails without stepscope: {why_failed(bare)}")
        captured = _captured(script, folder, home)
    except NoTrialError as problem:
        return Trial(name=script.name, problem=str(problem))
    return _trial(script, bare, captured, home)


def _bare(script: Script, folder: Path, home: Path) -> Ended:
    shutil.rmtree(home, ignore_errors=True)
    (home / "counts").mkdir(parents=True)
    prepare(script, folder, home / "bare")
    words = shlex.split(script.command)
    counts = {"FIELD_COUNTS": str(home / "counts")}
    bare = run_copy(script, words, folder, home / "bare", first=COUNTER, **counts)
    saved = {"row": repr(script), "ended": asdict(bare)}
    (home / "bare.json").write_text(json.dumps(saved))
    return bare


def _bare_before(script: Script, home: Path) -> Ended | None:
    saved = _json(home / "bare.json")
    if saved.get("row") != repr(script) or saved["ended"]["code"] != 0:
        return None
    return Ended(**saved["ended"])


def _captured(script: Script, folder: Path, home: Path) -> Ended:
    for leftover in ("captured", "run"):
        shutil.rmtree(home / leftover, ignore_errors=True)
    prepare(script, folder, home / "captured")
    ours = [sys.executable, "-m", "stepscope", "run", "--out", str(home / "run")]
    words = [*ours, *script.options, "--", *shlex.split(script.command)]
    return run_copy(script, words, folder, home / "captured")


def why_failed(ended: Ended) -> str:
    """The last error of a Python process, even if a launcher prints more after it."""
    errors = re.findall(r"(?m)^(?:\[rank\d+\]: )?(\w+Error: .+)$", ended.err)
    return str(errors[-1]) if errors else last_line(ended.err) or f"exit code {ended.code}"


def missing_file(script: Script, folder: Path) -> Path | None:
    home = folder / script.repository
    needed = [home / script.path, *(folder / "data" / name for name in script.data.values())]
    return next((path for path in needed if not path.exists()), None)


def prepare(script: Script, folder: Path, place: Path) -> None:
    """A copy to run in, with its data and its edits."""
    home = place / "home"
    shutil.copytree(folder / script.repository / script.copied, home)
    for inside, name in script.data.items():
        source, target = folder / "data" / name, home / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)
    for file, changes in script.edits.items():
        text = (home / file).read_text()
        for old, new in changes:
            if old not in text:
                raise NoTrialError(f"{file} has changed: it no longer says {old!r}")
            text = text.replace(old, new)
        (home / file).write_text(text)
    if script.before:
        first = run_copy(script, shlex.split(script.before), folder, place)
        if first.code:
            raise NoTrialError(f"{script.before} fails: {why_failed(first)}")


def run_copy(
    script: Script,
    words: list[str],
    folder: Path,
    place: Path,
    *,
    first: Path | None = None,
    **changes: str,
) -> Ended:
    """Run one command in its copy; its output is kept next to the copy."""
    path = [first, script.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH"), folder / "site"]
    changed: dict[str, str | None] = {
        **script.env,
        **changes,
        "PYTHONPATH": os.pathsep.join(str(entry) for entry in path if entry),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }
    out, err = place / "stdout", place / "stderr"
    began = time.perf_counter()
    with out.open("wb") as to_out, err.open("wb") as to_err:
        child = subprocess.Popen(
            words,
            env=environment(**changed),
            cwd=place / "home",
            stdin=subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_err,
            start_new_session=True,
        )
        code = _wait(child, script.timeout_s)
    wall_s = time.perf_counter() - began
    return Ended(code=code, wall_s=wall_s, out=_text(out), err=_text(err))


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _trial(script: Script, bare: Ended, captured: Ended, home: Path) -> Trial:
    run = home / "run"
    ranks = _json(run / "run.json").get("ranks", [])
    traces = sum("trace.json.gz" in rank.get("captured", ()) for rank in ranks)
    answer = explained(run) if traces else {}
    counted = _counted(home / "counts")
    return Trial(
        name=script.name,
        problem=None if captured.code is not None else f"captured, over {script.timeout_s:.0f} s",
        ranks=script.ranks,
        traced=script.traced,
        own_steps=script.own_steps(bare.out + bare.err),
        counted_steps=tuple(steps for steps, _ in counted),
        bare_step_ms=next((ms for _, ms in counted if ms is not None), None),
        seen_steps=tuple(int(rank.get("steps") or 0) for rank in ranks),
        bare_code=bare.code,
        captured_code=captured.code,
        same_losses=_same(script, bare, captured),
        traces=traces,
        verdict=answer.get("verdict"),
        findings=tuple(finding["id"] for finding in answer.get("findings", ())),
        step_ms=(answer.get("budget") or {}).get("step_ms"),
        bare_s=bare.wall_s,
        captured_s=captured.wall_s,
        messages=tuple(
            line for line in captured.err.splitlines() if line.startswith("stepscope: ")
        ),
    )


def _counted(counts: Path) -> list[tuple[int, float | None]]:
    """For each process that trained: its steps, and the median time between two of them in ms.

    A step is one of the busiest optimizer's; without an optimizer, a backward pass.
    """
    return sorted(_steps_of(path.read_text()) for path in counts.iterdir())


def _steps_of(log: str) -> tuple[int, float | None]:
    at = step_times(log)
    gaps = [later - earlier for earlier, later in pairwise(at)]
    return len(at), median(gaps) / 1e6 if gaps else None


def step_times(log: str) -> list[int]:
    """When the busiest optimizer stepped, in ns; without an optimizer, when a backward pass ran."""
    calls = [call for call in _calls(log) if call[1] != _EPOCH]
    times = Counter(number for _, number in calls)
    busiest = max(times, key=lambda number: (number >= 0, times[number]), default=None)
    return [time_ns for time_ns, number in calls if number == busiest]


def epoch_times(log: str) -> list[int]:
    """When a data loader began an epoch, in ns: more than one step lies between two steps then."""
    return [time_ns for time_ns, number in _calls(log) if number == _EPOCH]


def _calls(log: str) -> list[tuple[int, int]]:
    rows = (line.split() for line in log.splitlines())
    return [(int(time_ns), int(number)) for time_ns, number in rows]


def _same(script: Script, bare: Ended, captured: Ended) -> bool | None:
    """Whether both runs printed the same losses (ranks in any order); None without losses."""
    if not script.same:
        return None
    outputs = (bare.out + bare.err, captured.out + _without_ours(captured.err))
    losses = [sorted(re.findall(script.same, output)) for output in outputs]
    return losses[0] == losses[1] if losses[0] else None


def _without_ours(err: str) -> str:
    """What the script itself wrote to stderr: without our messages and without our report."""
    lines = err.partition("stepscope: run folder")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("stepscope: "))


def explained(run: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "stepscope", "explain", "--json", str(run)]
    answer = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    (run.parent / "explain.json").write_text(answer.stdout)
    return _json(run.parent / "explain.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
