"""The worker: a child process of `serve` that reads run folders and traces, and predicts.

It takes one job per line on stdin and answers with one line on the stdout that it was started
with; everything else that is printed goes to stderr. It ends when stdin closes, so it never
outlives its parent. `worker_process` is the other end.
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
from stepscope.ui.serve.listed_runs import path_of

if TYPE_CHECKING:
    from stepscope.predict.engine import Bench
    from stepscope.records.explanation import RankExplanation

    Job = dict[str, Any]

_NICE = 10


def _summarise(job: Job) -> Any:
    from stepscope.ui.serve.listed_runs import summarise

    return summarise(path_of(job["path"]), job["kind"])


def _explain(job: Job) -> Any:
    from stepscope.ui.serve_worker.explained_run import explain_run

    return explain_run(path_of(job["path"]))


def _write_report(job: Job) -> Any:
    from stepscope.trace.run_folder.related_runs import is_tune_folder
    from stepscope.ui.api import write_report
    from stepscope.ui.html.panes.tune import write_tune_report

    folder, target = path_of(job["path"]), path_of(job["target"])
    if is_tune_folder(folder):
        write_tune_report(folder, target)
    else:
        write_report(folder, target)
    return {}


def _compare(job: Job) -> Any:
    """As `stepscope compare A B --html`, but no promise is answered: looking changes nothing."""
    from stepscope.ui.api import compare
    from stepscope.ui.html.comparison import write_comparison
    from stepscope.ui.topics.comparison import comparison_answer

    comparison = compare(path_of(job["a"]), path_of(job["b"]))
    write_comparison(comparison, path_of(job["target"]))
    answer = comparison_answer(comparison)
    return {"verdict": answer.verdict, "why": answer.why}


_benches: dict[str, tuple[Bench, RankExplanation, str]] = {}


def _open_bench(job: Job) -> tuple[Bench, RankExplanation, str]:
    """The last one stays open: several changes are tried on one run."""
    key = f"{job['path']}:{job['stamp']}"
    if key not in _benches:
        from stepscope.trace.run_folder.related_runs import traced_run
        from stepscope.ui.advice import open_slowest

        _benches.clear()
        _benches[key] = open_slowest(str(traced_run(path_of(job["path"]))), cache=True)
    return _benches[key]


def _predict(job: Job) -> Any:
    from stepscope.ui.serve_worker.explained_run import predict_changes

    return predict_changes(*_open_bench(job), job["settings"])


_JOBS: dict[str, Callable[[Job], Any]] = {
    "summarise": _summarise,
    "explain": _explain,
    "report": _write_report,
    "compare": _compare,
    "predict": _predict,
}


def answer(line: bytes) -> dict[str, Any]:
    """One job's result, or what went wrong in a sentence."""
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
        return {
            "error": f"a defect in stepscope: {type(error).__name__}: {error}",
            "exit_code": 1,
        }


def main() -> None:
    """Until stdin closes."""
    kept = os.dup(1)
    answers = os.fdopen(kept, "wb")
    os.dup2(2, 1)
    if "--background" in sys.argv[1:]:
        os.nice(_NICE)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(line)).encode("ascii") + b"\n")
        answers.flush()
        gc.collect()


if __name__ == "__main__":
    main()
