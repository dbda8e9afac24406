"""stepscope whatif: what a change would save, before anybody tries it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, UsageError
from stepscope.ui.cli.options import (
    complete_file,
    flag,
    json_option,
    mode_option,
    names_starting,
    no_cache_option,
    verb,
)
from stepscope.ui.json_text import write_json

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stepscope.predict.engine import Bench
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.prediction import Prediction, Setting
    from stepscope.ui.topics.whatif import Tried, Verdict
    from stepscope.ui.words import Answer

    OpenedBench = tuple[Bench, RankExplanation, str]


def _complete(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    from stepscope.changes import PREDICTED

    return names_starting(PREDICTED, incomplete)


@verb(
    "whatif",
    examples=(
        ("stepscope whatif stepscope-runs/my-run", "Predict the usual changes, one at a time"),
        (
            "stepscope whatif trace.json.gz --set precision=bf16 --set batch=x2",
            "Predict two changes made together",
        ),
        ("stepscope whatif trace.json.gz --gpus", "Predict the same step on other GPUs"),
    ),
    groups={
        "The change": "--set --list --gpus",
        "Predictions and results": "--remember --history",
    },
    modes={"--gpus": "gpus", "--history": "record"},
)
@click.argument("paths", nargs=-1, shell_complete=complete_file)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="CHANGE[=VALUE]",
    shell_complete=_complete,
    help="A change, such as precision=bf16 or batch=x2. Repeat it to combine changes. Without it, "
    "the usual changes are predicted one at a time.",
)
@flag("--list", "List the changes that can be predicted.", "as_list")
@mode_option(
    "--gpus",
    "Predict the step on other GPUs, side by side. `whatif --gpus --help` has its options.",
)
@flag("--remember", "Save the prediction, so that `compare` and `ab` check it later.")
@mode_option(
    "--history",
    "Show saved predictions beside their results. `whatif --history --help` has its options.",
)
@json_option
@no_cache_option
def command(
    paths: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
    remember: bool,
    as_list: bool,
    no_cache: bool,
) -> None:
    """Predict what a change would save, from a recorded step without it.

    PATHS are a run folder, the run folders of all hosts of one job, a trace or a folder of traces.
    With several ranks, the prediction is about the slowest one, because the others wait for it.
    """
    from stepscope.ui.api import parse_settings

    if as_list:
        _print_list(as_json)
        return
    if not paths:
        raise UsageError("name a trace or a run folder; --list shows what can be changed")
    if remember and not settings:
        raise UsageError("--remember saves one prediction: name it with --set")
    wanted = parse_settings(settings)
    outcome = predict_outcome(paths, wanted, cache=not no_cache, quiet=as_json, keep=remember)
    if as_json:
        write_json(outcome_json(outcome))
        return
    from stepscope.ui.terminal.whatif import print_predictions

    print_predictions(
        outcome.tried,
        headline=outcome.headline,
        answer=outcome.answer,
        judged=outcome.judged,
        assumptions=outcome.assumptions,
        on_host=outcome.on_host,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatifOutcome:
    """What `whatif` answers, before it is printed."""

    tried: Tried
    headline: str
    answer: Answer
    judged: Verdict
    on_host: bool
    together: bool  # the changes are predicted together; else each alone
    assumptions: tuple[str, ...] = ()
    more: dict[str, Any]  # what only the JSON says


def predict_outcome(
    paths: Sequence[str],
    wanted: list[Setting],
    *,
    cache: bool,
    quiet: bool,
    keep: bool = False,
    open_with: Callable[..., OpenedBench] | None = None,
) -> WhatifOutcome:
    """Predict the changes together, or the usual ones each alone if none is named.

    `open_with` opens the run, for a caller that keeps it open for other changes.
    """
    from stepscope.ui.api import open_bench
    from stepscope.ui.topics.whatif import find_server_runs

    if runs := find_server_runs(paths, wanted):
        if keep:
            raise UsageError(
                "--remember saves predictions from traces only; `compare` reads no others"
            )
        return _predict_server(runs, wanted)
    bench, rank, about = (open_with or open_bench)(*paths, cache=cache, quiet=quiet)
    path = shlex.join(paths)
    if wanted:
        return _predict(bench, wanted, rank, about, path if keep else None)
    return _predict_usual(bench, rank, about, path=path)


def outcome_json(outcome: WhatifOutcome) -> dict[str, Any]:
    """`whatif --json`."""
    from stepscope.ui.topics.whatif import prediction_json

    tried, answer = outcome.tried, outcome.answer
    first = tried.predictions[0] if outcome.together else tried.before
    body = prediction_json(first, tried.before)
    if not outcome.together:
        body["tried"] = [prediction_json(step, tried.before) for step in tried.predictions]
    sentences = {"sentence": answer.verdict, "why": answer.why, "next": answer.next}
    return body | outcome.more | sentences


def _predict_server(runs: Sequence[Path], wanted: list[Setting]) -> WhatifOutcome:
    """Answer from what a parameter server recorded."""
    from stepscope.ui.topics import whatif as topic
    from stepscope.ui.words import Answer

    tried = topic.predict_server(runs, wanted)
    best = tried.predictions[0]
    alone = {"raw_ms": best.predicted_ms, "promise": None}
    return WhatifOutcome(
        tried=tried,
        headline=topic.describe_run(tried, runs),
        answer=Answer(
            verdict=topic.verdict(best),
            why=topic.describe_rates(tried),
            next="train with it, then `stepscope explain` shows whether it helped",
        ),
        judged=topic.judge(best),
        assumptions=best.assumptions,
        on_host=True,
        together=bool(wanted),
        more={"rank": None} | (alone if wanted else {}),
    )


def _predict(
    bench: Bench,
    wanted: list[Setting],
    rank: RankExplanation,
    about: str,
    remember_for: str | None,
) -> WhatifOutcome:
    """Answer for changes together; `remember_for` is the path of a prediction to keep."""
    from stepscope.ui.topics import whatif as topic
    from stepscope.ui.words import Answer
    from stepscope.verify.track_record import history

    before, raw = bench.predict([]), topic.predict_together(bench, wanted)
    after = topic.adjusted(raw, history())
    promise = None if remember_for is None else _remember(raw, bench, remember_for)
    on_host, judged = bench.context.on_host, topic.judge(after)
    return WhatifOutcome(
        tried=topic.Tried(before=before, predictions=(after,), refused=after.refused),
        headline=topic.headline(rank, before, about),
        answer=Answer(
            verdict=topic.verdict(after),
            why=topic.why(before, after, on_host=on_host),
            next=_next_after_prediction(judged, promise, memory=topic.frees_memory(after)),
        ),
        judged=judged,
        assumptions=after.assumptions,
        on_host=on_host,
        together=True,
        more={"rank": rank.rank, "raw_ms": raw.predicted_ms, "promise": promise},
    )


def _predict_usual(bench: Bench, rank: RankExplanation, about: str, *, path: str) -> WhatifOutcome:
    from stepscope.ui.api import predict_changes
    from stepscope.ui.topics import whatif as topic
    from stepscope.ui.words import Answer

    tried = predict_changes(bench, rank, [])
    if not tried.predictions:
        raise NotCapturedError(f"{path}: nothing can be predicted: {'; '.join(tried.refused)}")
    best, on_host = tried.predictions[0], bench.context.on_host
    sentence = "none of the usual changes would make this step faster"
    next_ = "several changes together may save more: repeat --set"
    worth = topic.judge(best) == "faster"
    if worth:
        trial = f"stepscope whatif {path} --set {best.settings[0]}"
        sentence = topic.verdict(best)
        next_ = f"{trial} shows what it assumes; repeat --set to combine"
    why = topic.why(tried.before, best, on_host=on_host)
    return WhatifOutcome(
        tried=tried,
        headline=topic.headline(rank, tried.before, about),
        answer=Answer(verdict=sentence, why=why, next=next_),
        judged="faster" if worth else "no difference",
        on_host=on_host,
        together=False,
        more={"rank": rank.rank, "refused": list(tried.refused)},
    )


def _next_after_prediction(judged: Verdict, promise: str | None, *, memory: bool) -> str:
    compare = "try it, then `stepscope compare BEFORE AFTER`"
    if promise:
        return f"{compare} checks prediction {promise}"
    if judged == "faster":
        return f"{compare}; --remember saves the prediction to check"
    if memory:
        return f"if memory is short, {compare}; otherwise leave it"
    return "leave it; `stepscope whatif` without --set predicts the usual changes"


def _remember(raw: Prediction, bench: Bench, path: str) -> str:
    """Keep the model's own number: later predictions are adjusted by how it fared."""
    from stepscope.trace.run_folder.rank_facts import read_facts
    from stepscope.verify.track_record import make_promise, remember
    from stepscope.verify.traits import describe_trace

    trace = bench.context.trace
    workload = describe_trace(trace, read_facts(Path(trace.path).parent))
    return remember(make_promise(raw, workload, path)).id


def _print_list(as_json: bool) -> None:
    from stepscope.changes import PREDICTED

    if as_json:
        rows = [{"name": name, "help": change.help} for name, change in PREDICTED.items()]
        write_json({"schema": 1, "whatifs": rows})
        return
    width = max(map(len, PREDICTED))
    for name, change in PREDICTED.items():
        click.echo(f"{name:<{width}}  {change.help}")
