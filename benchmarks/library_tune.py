"""`stepscope tune` on the library models: what it promised, what it measured, what it kept.

    python benchmarks/library_tune.py [--models llama,swin] [--seconds 570] [--budget 150] \\
        --out tune.json [--hand hand.json] [-- OPTIONS OF TUNE]

Models come in turn until --seconds are spent. Each result is saved as soon as it is there; a model
whose result is in --out is not tuned again, and a tune that was cut goes on where its folder in
--work ends. Prints the table of library_table.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "src"))

import library_results
from library_table import print_tables
from library_turn import FOLDER_VARIABLE, Turns

ROOT = Path(__file__).parent.parent
LEAST_S = 60  # no tune is begun with less
_AFTER_BUDGET_S = 60  # the first capture is explained, the last trial ends, the answer is written
_PATIENCE_S = 20
_LAST_LINES = 15
_SAVING = threading.Lock()


def main() -> None:
    ours, for_tune = _split(sys.argv[1:])
    options = _parser().parse_args(ours)
    end = time.monotonic() + options.seconds
    known = {} if options.again else library_results.read(options.out)
    names = [
        name
        for name in library_results.chosen(options.models)
        if not _is_done(known.get(name), options)
    ]
    turns = Turns(_turns_folder(options))
    with turns.kept_going(), ThreadPoolExecutor(options.at_once) as pool:
        for name in names:
            pool.submit(_tune_in_time, name, end, options, for_tune)
    print_tables(library_results.read(options.out), library_results.merged(options.hand))


def _tune_in_time(name: str, end: float, options: argparse.Namespace, for_tune: list[str]) -> None:
    budget_s = min(options.budget, end - time.monotonic() - _AFTER_BUDGET_S)
    if budget_s < LEAST_S:
        print(f"{name}: not tuned, no time left", flush=True)
        return
    print(f"{name}: tuning for {budget_s:.0f} s at most", flush=True)
    try:
        result = _tune(name, budget_s, options, for_tune)
    except Exception as error:
        result = {"answer": None, "cut": False, "seconds": 0.0, "failure": repr(error)}
    with _SAVING:
        library_results.save(options.out, name, result)
    print(f"{name}: {_outcome(result)}", flush=True)


def _is_done(known: dict[str, Any] | None, options: argparse.Namespace) -> bool:
    if known is None or known["answer"] is None or known["cut"]:
        return False
    return not options.go_on or not _wants_time(known["answer"])


def _wants_time(answer: dict[str, Any]) -> bool:
    reasons = [row.get("why", "") for row in (*answer["trials"], *answer.get("left_out", ()))]
    return answer.get("status") != "finished" or any("budget was spent" in why for why in reasons)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", help="names with commas between; all without it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/library_tune.json"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "library-tune")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all models")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for one model")
    parser.add_argument("--steps", type=int, default=40, help="of each trial")
    parser.add_argument(
        "--at-once", type=int, default=1, help="tunes beside each other; each is timed alone"
    )
    parser.add_argument("--hand", type=Path, action="append", default=[], help="to compare with")
    parser.add_argument("--again", action="store_true", help="models that --out holds too")
    parser.add_argument("--go-on", action="store_true", help="tunes that ran out of time too")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU can train")
    return parser


def _tune(
    name: str, budget_s: float, options: argparse.Namespace, for_tune: list[str]
) -> dict[str, Any]:
    """One model's result; whatever goes wrong costs this model only."""
    options.work.mkdir(parents=True, exist_ok=True)
    folder = (options.work / name).absolute()
    if options.again:
        _set_aside(folder)
    began = time.monotonic()
    code, cut, output = _run(_command(name, folder, budget_s, options, for_tune), budget_s)
    answer = _read_answer(folder, output.stdout)
    result = {
        "answer": answer,
        "promised_ms": _promise(folder, answer) if answer else None,
        "exit_code": code,
        "cut": cut,
        "seconds": time.monotonic() - began,
        "failure": None,
    }
    if answer is None:
        lines = output.stderr.strip().splitlines() or [f"exit code {code}"]
        result |= {"failure": lines[-1], "output": lines[-_LAST_LINES:]}
    return result


def _command(
    name: str, folder: Path, budget_s: float, options: argparse.Namespace, for_tune: list[str]
) -> list[str]:
    script = [sys.executable, str(library_results.script(name))]
    if options.at_once > 1 or FOLDER_VARIABLE in os.environ:
        turn = Path(__file__).with_name("library_turn.py")
        script[1:1] = [str(turn), str(_turns_folder(options))]
    if options.tiny:
        script.append("--tiny")
    if options.device != "cuda":
        script += ["--device", options.device]
    if options.batch:
        script += ["--batch", str(options.batch)]
    tune = [sys.executable, "-m", "stepscope", "tune", "--json", "--budget", f"{budget_s:.0f}s"]
    if (folder / "journal.jsonl").exists():
        return [*tune, "--resume", str(folder), "--", *script]
    _set_aside(folder)
    return [*tune, "--steps", str(options.steps), "--out", str(folder), *for_tune, "--", *script]


def _turns_folder(options: argparse.Namespace) -> Path:
    """One for all benchmarks that run at the same time, if the environment names it."""
    return Path(os.environ.get(FOLDER_VARIABLE) or options.work.absolute() / "turns")


def _set_aside(folder: Path) -> None:
    """What an earlier try left is moved away, not deleted."""
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-{time.time_ns()}"))


def _run(command: list[str], budget_s: float) -> tuple[int, bool, Any]:
    """Exit code, whether it had to be stopped, and what it printed."""
    environment = dict(os.environ)
    places = [*environment.get("PYTHONPATH", "").split(os.pathsep), str(ROOT / "src")]
    environment["PYTHONPATH"] = os.pathsep.join(
        str(Path(place).absolute()) for place in places if place
    )
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        child = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=out, stderr=err, start_new_session=True
        )
        cut = _wait(child, budget_s + _AFTER_BUDGET_S)
        out.seek(0)
        err.seek(0)
        output = subprocess.CompletedProcess(command, child.returncode, out.read(), err.read())
    return child.returncode, cut, output


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Past the limit, ask as Ctrl-C does, then more firmly."""
    for number, patience_s in (
        (signal.SIGINT, limit_s),
        (signal.SIGTERM, _PATIENCE_S),
        (signal.SIGKILL, _PATIENCE_S),
    ):
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.send_signal(number)
        else:
            return number != signal.SIGINT
    child.wait()
    return True


def _read_answer(folder: Path, printed: str) -> dict[str, Any] | None:
    """tune.json, or what was printed; None if neither is whole."""
    for text in (_text(folder / "tune.json"), printed):
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(answer, dict) and answer.get("baseline_ms") is not None:
            return answer
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _promise(folder: Path, answer: dict[str, Any]) -> float | None:
    """The step that the what-ifs predict for all that was kept, from the first capture alone."""
    try:
        from stepscope.changes import PREDICTED
        from stepscope.predict.whatifs import settings_for_remedy
        from stepscope.records.prediction import Setting
        from stepscope.ui.api import open_bench

        settings = []
        for remedy in answer["kept"]:
            name, _, value = remedy.partition("=")
            by_value = value and name in PREDICTED and PREDICTED[name].takes_value
            settings += (
                [Setting(name=name, value=value)] if by_value else settings_for_remedy(name)[:1]
            )
        if not settings:
            return None
        bench, _, _ = open_bench(str(folder / "baseline"), cache=False, quiet=True)
        prediction = bench.predict(settings)
        return float(prediction.predicted_ms) if prediction.applied else None
    except Exception as error:
        print(f"{folder.name}: no promise for the combination: {error}", flush=True)
        return None


def _outcome(result: dict[str, Any]) -> str:
    took = f"{result['seconds']:.0f} s"
    answer = result["answer"]
    if answer is None:
        return f"failed in {took}: {result['failure']}"
    steps = f"{answer['baseline_ms']:.2f} -> {answer['best_ms']:.2f} ms"
    kept = " + ".join(answer["kept"]) or "nothing kept"
    return f"{steps}, {kept}, {answer.get('status', '')}, in {took}"


if __name__ == "__main__":
    main()
