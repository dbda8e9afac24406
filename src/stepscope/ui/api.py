"""stepscope from Python: what the verbs do, as functions that return records.

Nothing is printed, and nothing is kept in the track record. Errors are those of errors.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.records.comparison import Comparison
from stepscope.records.explanation import Explanation
from stepscope.records.prediction import Prediction

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]


def explain(
    paths: Paths, *, memory_limit: int | str | None = None, cache: bool = True
) -> Explanation:
    """Explain where each step's time goes: a trace, a folder of traces, a run folder, or several.

    `memory_limit` is in bytes or written as 24GB. The advice is that of `stepscope explain`.
    """
    from stepscope.ui.cli.explain import explain_paths
    from stepscope.ui.cli.options import parse_size

    limit = None if memory_limit is None else parse_size(str(memory_limit), "memory_limit")
    return explain_paths(_list_paths(paths), cache=cache, html=None, quiet=True, memory_limit=limit)


def whatif(
    path: Paths, *changes: str, cache: bool = True, **more: str | float | bool
) -> Prediction:
    """Predict the step with changes, before anybody makes them.

    Changes are as `stepscope whatif --set` takes them, or keywords: `whatif(run, "cuda-graphs",
    batch="x2")` is `whatif(run, cuda_graphs=True, batch="x2")`.
    """
    from stepscope.ui.cli.whatif import open_bench, parse_settings
    from stepscope.ui.topics.whatif import (
        adjusted,
        find_server_runs,
        predict_server,
        predict_together,
    )
    from stepscope.verify.track_record import history

    wanted = parse_settings([*changes, *_as_settings(more)])
    if not wanted:
        raise UsageError(
            "whatif needs a change, such as 'precision=bf16'; explain(path).advice holds the "
            "usual ones"
        )
    names = [str(one) for one in _list_paths(path)]
    if runs := find_server_runs(names, wanted):
        return predict_server(runs, wanted).predictions[0]
    bench, _, _ = open_bench(*map(str, _list_paths(path)), cache=cache, quiet=True)
    return adjusted(predict_together(bench, wanted), history())


def compare(a: Paths, b: Paths, *, paired: bool = False, cache: bool = True) -> Comparison:
    """Tell whether the step really changed from A to B. Each side is one run or several.

    `paired` says that the runs took turns: A's first with B's first, and so on.
    """
    from stepscope.verify import compare as verify

    sides = [[os.fspath(path) for path in _list_paths(side)] for side in (a, b)]
    return verify.compare(*sides, paired=paired, cache=cache)


def write_report(
    what: Explanation | Comparison | Paths, path: PathLike, *, cache: bool = True
) -> Path:
    """Write the HTML report of an explanation, a comparison or a path, and return where it is.

    Timelines are drawn from the traces, which are read again; a trace that has gone since leaves
    its rank without one.
    """
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target}: its folder does not exist")
    try:
        _write(what, target, cache)
    except OSError as error:
        raise UsageError(f"{target} could not be written: {error.strerror}") from None
    return target


def _write(what: Explanation | Comparison | Paths, target: Path, cache: bool) -> None:
    if isinstance(what, Comparison):
        from stepscope.ui.html.comparison import write_comparison

        write_comparison(what, target)
    elif isinstance(what, Explanation):
        _write_explanation(what, target, cache)
    else:
        from stepscope.ui.cli.explain import explain_paths

        explain_paths(_list_paths(what), cache=cache, html=target, quiet=True)


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


def _as_settings(settings: dict[str, str | float | bool]) -> list[str]:
    """batch="x2" is batch=x2, cuda_graphs=True is cuda-graphs; False leaves a change out."""
    return [
        name.replace("_", "-") if value is True else f"{name.replace('_', '-')}={value}"
        for name, value in settings.items()
        if value is not False
    ]
