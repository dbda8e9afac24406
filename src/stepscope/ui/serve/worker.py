"""The worker: a child process of `serve` that reads run folders and traces, and predicts.

It takes one job per line on stdin and answers with one line on the stdout that it was started
with; everything else that is printed goes to stderr. It ends when stdin closes, so it never
outlives its parent. `served_runs` is the other end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import StepscopeError
from stepscope.ui.serve.listed_runs import RunSummary, device_words, path_of, short_text, summarise

if TYPE_CHECKING:
    from stepscope.predict.engine import Bench
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.prediction import Prediction

    Job = dict[str, Any]

_NICE = 10


def _explain(job: Job) -> RunSummary:
    """Return verdict, MFU and what else only the traces say; fields that stay None are unknown."""
    from stepscope.explain.engines import open_engine
    from stepscope.ui.api import explain_paths
    from stepscope.ui.serve.metrics import least_mfu

    with open_engine("pool", 1) as engine:  # a training may need the other cores
        explanation = explain_paths([path_of(job["path"])], cache=True, quiet=True, engine=engine)
    slowest = max(explanation.ranks, key=lambda rank: rank.budget.step_ms, default=None)
    memory = slowest.memory if slowest else None
    return RunSummary(
        state="",
        verdict=short_text(explanation.verdict),
        mfu=least_mfu(explanation.ranks),
        step_ms=explanation.budget.step_ms or None,
        device=device_words(slowest.device) if slowest and slowest.device else None,
        peak_bytes=memory.peak_bytes if memory else None,
    )


def _write_report(job: Job) -> dict[str, str]:
    from stepscope.trace.run_folder.related_runs import is_tune_folder
    from stepscope.ui.api import write_report
    from stepscope.ui.html.panes.tune import write_tune_report

    folder, target = path_of(job["path"]), path_of(job["target"])
    (write_tune_report if is_tune_folder(folder) else write_report)(folder, target)
    return {}


def _compare(job: Job) -> dict[str, str]:
    """Do as `stepscope compare A B --html`, but answer no promise: looking changes nothing."""
    from stepscope.ui.api import compare
    from stepscope.ui.html.comparison import write_comparison
    from stepscope.ui.topics.comparison import comparison_answer

    comparison = compare(path_of(job["a"]), path_of(job["b"]))
    write_comparison(comparison, path_of(job["target"]))
    answer = comparison_answer(comparison)
    return {"verdict": answer.verdict, "why": answer.why}


_benches: dict[str, tuple[Bench, RankExplanation, str]] = {}


def _predict(job: Job) -> dict[str, Any]:
    """Predict changes together; without settings, the usual ones and those of findings alone."""
    from stepscope.trace.run_folder.related_runs import traced_run
    from stepscope.ui.advice import open_slowest
    from stepscope.ui.api import parse_settings, predict_changes
    from stepscope.ui.topics import whatif as topic

    key = f"{job['path']}:{job['stamp']}"
    if key not in _benches:  # the last one stays open: several changes are tried on one run
        _benches.clear()
        _benches[key] = open_slowest(str(traced_run(path_of(job["path"]))), cache=True)
    bench, rank, about = _benches[key]
    wanted = parse_settings(job["settings"])
    tried = predict_changes(bench, rank, wanted)
    before, first = tried.before, tried.predictions[0] if wanted else None
    on_host = bench.context.on_host
    return {
        "headline": topic.headline(rank, before, about),
        "rows": [_row(prediction, before) for prediction in tried.predictions],
        "why": topic.why(before, first, on_host=on_host) if first else "",
        "assumptions": list(first.assumptions) if first else [],
        "refused": list(dict.fromkeys(tried.refused)),
    }


def _row(prediction: Prediction, before: Prediction) -> dict[str, Any]:
    from stepscope.text.figures import interval, milliseconds, size
    from stepscope.ui.topics import whatif as topic

    peak = prediction.peak_bytes
    return {
        "change": topic.labels(prediction.settings),
        "settings": [str(setting) for setting in prediction.settings],
        "sentence": topic.verdict(prediction),
        "judged": topic.judge(prediction),
        "step": milliseconds(prediction.predicted_ms),
        "between": interval(prediction.low_ms, prediction.high_ms),
        "gain": " ".join(filter(None, topic.gain_of(prediction).words())),
        "memory": "not known" if peak is None else size(peak),
        "json": topic.prediction_json(prediction, before),
    }


_JOBS: dict[str, Callable[[Job], Any]] = {
    "summarise": lambda job: summarise(path_of(job["path"]), job["kind"]),
    "explain": _explain,
    "report": _write_report,
    "compare": _compare,
    "predict": _predict,
}


def answer(line: bytes) -> dict[str, Any]:
    """Return one job's result, or what went wrong in a sentence."""
    try:
        job = json.loads(line)
        return {"result": msgspec.to_builtins(_JOBS[job["job"]](job))}
    except StepscopeError as error:
        return {"error": "; ".join(map(str, error.args)), "exit_code": error.exit_code}
    except MemoryError:
        return {"error": "this needs more memory than there is", "exit_code": 3}
    except OSError as error:
        return {"error": f"{error.filename or 'a file'}: {error.strerror}", "exit_code": 3}
    except Exception as error:  # the next job must still be answered
        words = f"a defect in stepscope: {type(error).__name__}: {error}"
        return {"error": words, "exit_code": 1}


def main() -> None:
    """Answer until stdin closes."""
    stdout = os.dup(1)
    answers = os.fdopen(stdout, "wb")
    os.dup2(2, 1)
    if "--background" in sys.argv[1:]:
        os.nice(_NICE)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(line)).encode("ascii") + b"\n")
        answers.flush()
        gc.collect()


if __name__ == "__main__":
    main()
