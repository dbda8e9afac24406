"""stepscope whatif: what a change would save, before anybody tries it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, UsageError
from stepscope.ui.cli.options import (
    VerbCommand,
    complete_file,
    json_option,
    mode_option,
    no_cache_option,
)
from stepscope.ui.json_text import write_json

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stepscope.predict.engine import Bench
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.prediction import Prediction, Setting
    from stepscope.ui.topics.whatif import Verdict


def _complete(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from stepscope.changes import PREDICTED

    return [CompletionItem(name) for name in PREDICTED if name.startswith(incomplete)]


@click.command(
    cls=VerbCommand,
    name="whatif",
    examples=(
        ("stepscope whatif stepscope-runs/my-run", "Predict the usual changes, one at a time"),
        (
            "stepscope whatif trace.json.gz --set precision=bf16 --set batch=x2",
            "Predict two changes made together",
        ),
        ("stepscope whatif trace.json.gz --gpus", "Predict the same step on other GPUs"),
    ),
    option_groups=(
        ("The change", ("--set", "--list", "--gpus")),
        ("Predictions and results", ("--remember", "--history")),
    ),
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
@click.option("--list", "as_list", is_flag=True, help="List the changes that can be predicted.")
@mode_option(
    "--gpus",
    "Predict the step on other GPUs, side by side. `whatif --gpus --help` has its options.",
)
@click.option(
    "--remember",
    is_flag=True,
    help="Save the prediction, so that `compare` and `ab` check it later.",
)
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
    if as_list:
        _print_list(as_json)
        return
    if not paths:
        raise UsageError("name a trace or a run folder; --list shows what can be changed")
    if remember and not settings:
        raise UsageError("--remember saves one prediction: name it with --set")
    wanted = parse_settings(settings)
    if _predict_server(paths, wanted, as_json=as_json, keep=remember):
        return
    bench, rank, about = open_bench(*paths, cache=not no_cache, quiet=as_json)
    path = shlex.join(paths)
    if wanted:
        _predict(bench, wanted, rank, about, path=path, as_json=as_json, keep=remember)
    else:
        _predict_usual(bench, rank, about, path=path, as_json=as_json)


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Read settings as on the command line; most changes may be given only once."""
    from stepscope.changes import PREDICTED
    from stepscope.predict.whatifs import parse_setting

    wanted = [parse_setting(text) for text in texts]
    names = [setting.name for setting in wanted if not PREDICTED[setting.name].repeatable]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--set {twice[0]} is given twice")
    return wanted


def open_bench(*paths: str, cache: bool, quiet: bool = False) -> tuple[Bench, RankExplanation, str]:
    """Return the rank that decides the step, ready for predictions, and which one that is."""
    from stepscope.ui.advice import open_slowest
    from stepscope.ui.progress import shown_progress

    with shown_progress(quiet=quiet) as progress:
        return open_slowest(*paths, cache=cache, progress=progress)


def _predict_server(
    paths: tuple[str, ...], wanted: list[Setting], *, as_json: bool, keep: bool
) -> bool:
    """Answer from what a parameter server recorded; False if the traces have to answer."""
    from stepscope.ui.topics.whatif import (
        describe_rates,
        describe_run,
        find_server_runs,
        judge,
        predict_server,
        prediction_json,
        verdict,
    )
    from stepscope.ui.words import Answer

    runs = find_server_runs(paths, wanted)
    if not runs:
        return False
    if keep:
        raise UsageError("--remember saves predictions from traces only; `compare` reads no others")
    tried = predict_server(runs, wanted)
    best = tried.predictions[0]
    if as_json:
        body = prediction_json(best if wanted else tried.before, tried.before)
        every = [prediction_json(step, tried.before) for step in tried.predictions]
        alone = {"raw_ms": best.predicted_ms, "promise": None}
        write_json(body | {"rank": None} | (alone if wanted else {"tried": every}))
        return True
    from stepscope.ui.terminal.whatif import print_predictions

    print_predictions(
        tried,
        headline=describe_run(tried, runs),
        answer=Answer(
            verdict=verdict(best),
            why=describe_rates(tried),
            next="train with it, then `stepscope explain` shows whether it helped",
        ),
        judged=judge(best),
        assumptions=best.assumptions,
        on_host=True,
    )
    return True


def _predict(
    bench: Bench,
    wanted: list[Setting],
    rank: RankExplanation,
    about: str,
    *,
    path: str,
    as_json: bool,
    keep: bool,
) -> None:
    from stepscope.ui.topics.whatif import (
        Tried,
        adjusted,
        frees_memory,
        headline,
        judge,
        predict_together,
        prediction_json,
        verdict,
        why,
    )
    from stepscope.ui.words import Answer
    from stepscope.verify.track_record import history

    before, raw = bench.predict([]), predict_together(bench, wanted)
    after = adjusted(raw, history())
    promise = _remember(raw, bench, path) if keep else None
    if as_json:
        body = prediction_json(after, before) | {"rank": rank.rank, "raw_ms": raw.predicted_ms}
        write_json(body | {"promise": promise})
        return
    from stepscope.ui.terminal.whatif import print_predictions

    on_host, judged = bench.context.on_host, judge(after)
    print_predictions(
        Tried(before=before, predictions=(after,), refused=after.refused),
        headline=headline(rank, before, about),
        answer=Answer(
            verdict=verdict(after),
            why=why(before, after, on_host=on_host),
            next=_next_after_prediction(judged, promise, memory=frees_memory(after)),
        ),
        judged=judged,
        assumptions=after.assumptions,
        on_host=on_host,
    )


def _predict_usual(
    bench: Bench, rank: RankExplanation, about: str, *, path: str, as_json: bool
) -> None:
    from stepscope.ui.topics.whatif import (
        headline,
        judge,
        prediction_json,
        try_each,
        usual,
        verdict,
        why,
        with_offered,
    )
    from stepscope.ui.words import Answer
    from stepscope.verify.track_record import history

    tried = try_each(bench, with_offered(usual(bench), rank.findings), history())
    if not tried.predictions:
        raise NotCapturedError(f"{path}: nothing can be predicted: {'; '.join(tried.refused)}")
    if as_json:
        body = prediction_json(tried.before, tried.before) | {"rank": rank.rank}
        body["refused"] = list(tried.refused)
        body["tried"] = [prediction_json(step, tried.before) for step in tried.predictions]
        write_json(body)
        return
    from stepscope.ui.terminal.whatif import print_predictions

    best, on_host = tried.predictions[0], bench.context.on_host
    sentence = "none of the usual changes would make this step faster"
    next_ = "several changes together may save more: repeat --set"
    worth = judge(best) == "faster"
    if worth:
        trial = f"stepscope whatif {path} --set {best.settings[0]}"
        sentence, next_ = verdict(best), f"{trial} shows what it assumes; repeat --set to combine"
    print_predictions(
        tried,
        headline=headline(rank, tried.before, about),
        answer=Answer(verdict=sentence, why=why(tried.before, best, on_host=on_host), next=next_),
        judged="faster" if worth else "no difference",
        on_host=on_host,
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
        listed = [{"name": name, "help": change.help} for name, change in PREDICTED.items()]
        write_json({"schema": 1, "whatifs": listed})
        return
    width = max(map(len, PREDICTED))
    for name, change in PREDICTED.items():
        click.echo(f"{name:<{width}}  {change.help}")
