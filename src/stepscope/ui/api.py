"""stepscope from Python: what the verbs do, as functions that return records.

Nothing is printed, and nothing is kept in the track record. Errors are those of errors.py. The
command line stands on this file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.ui.user_input import require_folder, writing

if TYPE_CHECKING:
    from stepscope.explain.engines import Engine
    from stepscope.explain.explain_job import JobTraces
    from stepscope.predict.engine import Bench
    from stepscope.records.comparison import Comparison
    from stepscope.records.explanation import Explanation, RankExplanation
    from stepscope.records.hang import HangAnswer
    from stepscope.records.prediction import Prediction, Setting
    from stepscope.ui.topics.whatif import Tried

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]


def explain(
    paths: Paths, *, memory_limit: int | str | None = None, cache: bool = True
) -> Explanation:
    """Explain where each step's time goes: a trace, a folder of traces, a run folder, or several.

    `memory_limit` is in bytes or written as 24GB. The advice is that of `stepscope explain`.
    """
    from stepscope.ui.user_input import parse_size

    limit = None if memory_limit is None else parse_size(str(memory_limit), "memory_limit")
    return explain_paths(_list_paths(paths), cache=cache, quiet=True, memory_limit=limit)


def whatif(
    path: Paths, *changes: str, cache: bool = True, **more: str | float | bool
) -> Prediction:
    """Predict the step with changes, before anybody makes them.

    Changes are as `stepscope whatif --set` takes them, or keywords: `whatif(run, "cuda-graphs",
    batch="x2")` is `whatif(run, cuda_graphs=True, batch="x2")`.
    """
    from stepscope.ui.topics.whatif import find_server_runs, predict_server

    named = {name.replace("_", "-"): value for name, value in more.items() if value is not False}
    as_text = [name if value is True else f"{name}={value}" for name, value in named.items()]
    wanted = parse_settings([*changes, *as_text])
    if not wanted:
        raise UsageError(
            "whatif needs a change, such as 'precision=bf16'; explain(path).advice holds the "
            "usual ones"
        )
    paths = [str(one) for one in _list_paths(path)]
    if runs := find_server_runs(paths, wanted):
        return predict_server(runs, wanted).predictions[0]
    bench, rank, _ = open_bench(*paths, cache=cache, quiet=True)
    return predict_changes(bench, rank, wanted).predictions[0]


def compare(a: Paths, b: Paths, *, paired: bool = False, cache: bool = True) -> Comparison:
    """Tell whether the step really changed from A to B. Each side is one run or several.

    `paired` says that the runs took turns: A's first with B's first, and so on.
    """
    from stepscope.verify import compare as verify

    sides = [[os.fspath(path) for path in _list_paths(side)] for side in (a, b)]
    return verify.compare(*sides, paired=paired, cache=cache)


def hang(run: str | Path | None = None) -> HangAnswer:
    """Say who keeps a job from its next step; without `run`, in the newest run here."""
    from stepscope.explain.hang import explain_hang
    from stepscope.trace.run_folder.follow_run import choose_run
    from stepscope.trace.run_folder.hang_files import read_hang

    folder = choose_run(None if run is None else str(run), "hang")
    return explain_hang(read_hang(folder), time.time())


def write_report(
    what: Explanation | Comparison | Paths, path: PathLike, *, cache: bool = True
) -> Path:
    """Write the HTML report of an explanation, a comparison or a path, and return where it is.

    Timelines are drawn from the traces, which are read again; a trace that has gone since leaves
    its rank without one.
    """
    from stepscope.records.comparison import Comparison
    from stepscope.records.explanation import Explanation

    target = Path(path)
    require_folder(target)
    with writing(target):
        if isinstance(what, Comparison):
            from stepscope.ui.html.comparison import write_comparison

            write_comparison(what, target)
        elif isinstance(what, Explanation):
            _write_explanation(what, target, cache)
        else:
            explain_paths(_list_paths(what), cache=cache, html=target, quiet=True)
    return target


def _write_explanation(explanation: Explanation, target: Path, cache: bool) -> None:
    from stepscope.explain.explain_job import JobTraces, choose_ranks
    from stepscope.ui.advice import DRAWN_RANKS, advise_slowest, look_at_rank
    from stepscope.ui.html.report import write_report as write
    from stepscope.ui.tried_remedies import tune_of

    traces = JobTraces([rank.path for rank in explanation.ranks], cache=cache, skip_missing=True)
    ranks = choose_ranks(explanation, DRAWN_RANKS)
    looks = traces.visit(ranks, partial(look_at_rank, draw=True))
    advice = advise_slowest(traces, explanation, draw=True)
    pictures = [look.picture for look in looks if look.picture]
    whatif_page = advice.page if advice else None
    write(explanation, pictures, target, whatif=whatif_page, tune=tune_of(explanation))


def _list_paths(paths: Paths) -> list[str | Path]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [path if isinstance(path, str) else Path(path) for path in given]


# What verbs ask for beside the public functions.


def explain_paths(
    paths: Sequence[str | Path],
    *,
    cache: bool,
    html: Path | None = None,
    perfetto: Path | None = None,
    quiet: bool = False,
    engine: Engine | None = None,
    memory_limit: int | None = None,
) -> Explanation:
    """Read, explain and advise, with progress on stderr; write the files that are asked for."""
    from stepscope.explain.explain_job import JobTraces
    from stepscope.trace.run_folder.related_runs import traced_run
    from stepscope.ui import tried_remedies
    from stepscope.ui.advice import DRAWN_RANKS, add_advice, advise_slowest, choose_look
    from stepscope.ui.progress import shown_progress

    require_folder(html, "--html")
    require_folder(perfetto, "--perfetto")
    paths = [traced_run(path) for path in paths]
    draw = html is not None
    with shown_progress(quiet=quiet) as progress:
        traces = JobTraces(paths, cache=cache, memory_limit=memory_limit, engine=engine)
        look = choose_look(traces, draw=draw)
        explanation, looks = traces.explain(look, max_ranks=DRAWN_RANKS, progress=progress)
        advice = looks[0].advice if looks else None
        advice = advice or advise_slowest(traces, explanation, draw=draw)
        explanation = tried_remedies.add_origin(explanation)
        tune = tried_remedies.tune_of(explanation)
        explanation = tried_remedies.add_trials(explanation, tune)
        explanation = add_advice(explanation, advice, tried_remedies.tried_alone(tune))
        explanation = tried_remedies.next_by_tune(explanation, tune)
    if html:
        from stepscope.ui.html.report import write_report as write

        pictures = [look.picture for look in looks if look.picture]
        whatif_page = advice.page if advice else None
        with writing(html, "--html"):
            write(explanation, pictures, html, whatif=whatif_page, tune=tune)
    if perfetto:
        _write_perfetto(traces, explanation, perfetto)
    return explanation


def _write_perfetto(traces: JobTraces, explanation: Explanation, target: Path) -> None:
    from stepscope.explain.explain_job import choose_ranks
    from stepscope.ui.advice import DRAWN_RANKS
    from stepscope.ui.perfetto_trace import write_perfetto
    from stepscope.ui.say import say

    ranks = choose_ranks(explanation, DRAWN_RANKS)
    written = write_perfetto(traces, explanation, target, ranks=ranks)
    if len(ranks) < len(explanation.ranks):
        say(f"--perfetto: {len(ranks)} of {len(explanation.ranks)} ranks, those that findings name")
    say(f"for ui.perfetto.dev: {', '.join(map(str, written))}")


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


def predict_changes(bench: Bench, rank: RankExplanation, wanted: Sequence[Setting]) -> Tried:
    """Predict changes together, as past results teach; without any, the usual ones alone."""
    from stepscope.ui.topics import whatif as topic
    from stepscope.verify.track_record import history

    if not wanted:
        changes = topic.with_offered(topic.usual(bench), rank.findings)
        return topic.try_each(bench, changes, history())
    after = topic.adjusted(topic.predict_together(bench, wanted), history())
    return topic.Tried(before=bench.predict([]), predictions=(after,), refused=after.refused)
