"""Several trace files, one explanation. A worker reads each file; only summaries come back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stepscope.errors import UsageError
from stepscope.explain.engines import map_in_order
from stepscope.explain.explain_file import explain_file, try_explain_file
from stepscope.explain.pool_engine import Here, Pool
from stepscope.explain.rank_numbers import number_ranks
from stepscope.explain.rank_without_trace import (
    gather_untraced,
    is_rank_folder,
    notes_on_untraced,
    split_attempts,
    summarise_rank,
)
from stepscope.explain.separate_jobs import SeveralJobsError, group_jobs
from stepscope.explain.verdict import judge
from stepscope.records.quality import Note
from stepscope.records.together_folder import FOLDER
from stepscope.trace.discover import find_files_of_job, find_traces, named_file
from stepscope.trace.job_folders import JobFolders, join_folders
from stepscope.trace.rank_inputs import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.explain.engines import Engine
    from stepscope.explain.explain_file import ExplainedFile, Visit
    from stepscope.explain.rank_without_trace import SplitRanks
    from stepscope.records.explanation import Explanation, NcclSummary, RankExplanation
    from stepscope.records.profile import Profile
    from stepscope.records.ranks_without_trace import RankWithoutTrace
    from stepscope.records.together_summary import TogetherSummary
    from stepscope.records.whole_run import RankRun
    from stepscope.trace.discover import TraceFile
    from stepscope.trace.files import Progress

# With more ranks than this, each rank's tables are cut to SHORT_ROWS rows: nobody reads a thousand
# tables to their ends, and all of them must fit in memory and in one report.
MANY_RANKS = 64
SHORT_ROWS = 100
_FEW_FOLDERS = 8  # without a trace: starting processes would take longer than reading them
_SHORT_TABLES = (
    f"more than {MANY_RANKS} ranks: the tables of each hold its longest {SHORT_ROWS} rows, and "
    "what is left out is summed in rows called (others)"
)
_R = TypeVar("_R")


def explain_job(
    *paths: str | Path, cache: bool = True, progress: Progress | None = None
) -> Explanation:
    """Explain trace files, folders of them, or run folders, as one job."""
    return JobTraces(paths, cache=cache).explain(progress=progress)[0]


class JobTraces:
    """The trace files of one job: found once, then explained and visited, rank by rank.

    `visit(analysis, explanation)` is called in the process that has read a rank's trace. Its
    results come back in the order of the ranks; from another process they must be picklable.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        cache: bool = True,
        memory_limit: int | None = None,
        engine: Engine | None = None,
        skip_missing: bool = False,
    ) -> None:
        self.paths = paths
        self._engine = engine or Pool()
        self._job = JobFolders()
        find = partial(self._find_files, skip_missing=skip_missing)
        found = self._engine.agree(find)
        self.folders = [file for file in found if is_rank_folder(file)]  # without a trace
        self.files: list[TraceFile] = [file for file in found if not is_rank_folder(file)]
        self._by_name = {str(file): file for file in self.files}
        self._options = ReadOptions(
            cache=cache, memory_limit=memory_limit, same_rank=self._job.same_rank
        )

    def _find_files(self, *, skip_missing: bool) -> list[TraceFile]:
        """An engine calls this: a failure here must not keep other processes waiting."""
        if not self.paths:
            raise UsageError(
                "nothing to explain: give a trace file, a folder of them or a run folder"
            )
        self._job = join_folders(self.paths)
        found = find_files_of_job(self.paths, self._job, skip_missing=skip_missing)
        return [*found.traces, *found.folders]

    @property
    def is_single(self) -> bool:
        """Whether there is one file only, and this process reads it."""
        return len(self.files) == 1 and self._engine.local

    def explain(
        self,
        visit: Visit[_R] | None = None,
        *,
        max_ranks: int | None = None,
        progress: Progress | None = None,
    ) -> tuple[Explanation, list[_R]]:
        """Explain all ranks; the results of the visits come with it.

        With more than `max_ranks` ranks only those that findings name and the first ones are
        visited, and their files are read a second time.
        """
        at_once = visit if self._visits_all(max_ranks) else None
        copies: list[Note] = []
        explained, failures = self._sort_out(list(self._outcomes(at_once, progress)))
        untraced, unread = gather_untraced(self._untraced(progress))
        split = split_attempts([file.rank for file in explained], untraced)
        explained = [explained[place] for place in split.current]
        if not self._engine.collective:  # its processes are one job
            grouped = group_jobs([file.rank for file in explained])
            jobs = [[explained[place] for place in job] for job in grouped.jobs]
            if len(jobs) > 1:
                alone = [_judge_alone([file.rank for file in job]) for job in jobs]
                raise SeveralJobsError(alone, grouped.why)
            explained, copies = jobs[0], grouped.notes
        ranks, notes = number_ranks([file.rank for file in explained], split.untraced)
        notes += copies
        order = sorted(range(len(ranks)), key=lambda i: (ranks[i].rank or 0, ranks[i].path))
        failures += unread
        explanation = self._judge(tuple(ranks[i] for i in order), notes, failures, split)
        if visit is not None and max_ranks is not None and at_once is None:
            return explanation, self.visit(choose_ranks(explanation, max_ranks), visit)
        return explanation, [result for i in order for result in explained[i].results]

    def take_part(self, visit: Visit[_R] | None = None, *, max_ranks: int | None = None) -> None:
        """This process's share of `explain`, when another process of the engine leads."""
        for _ in self._outcomes(visit if self._visits_all(max_ranks) else None):
            pass
        for _ in self._untraced():
            pass

    def visit(self, ranks: Iterable[RankExplanation], visit: Visit[_R]) -> list[_R]:
        """Read these ranks again and visit them; those that cannot be read are left out."""
        # Only the process that leads comes here: a collective engine would wait for the others.
        engine = Here() if self._engine.collective else self._engine
        files = [file for rank in ranks if (file := self._by_name.get(rank.path))]
        read = partial(try_explain_file, visit=visit, options=self._options, max_rows=0)
        outcomes: Iterable[ExplainedFile[_R] | Exception] = map_in_order(engine, read, files)
        explained = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        return [result for file in explained for result in file.results]

    def visit_here(
        self, path: str, visit: Visit[_R], progress: Progress | None = None
    ) -> ExplainedFile[_R]:
        """Read one rank's file in this process and visit it. Raises StepscopeError."""
        file = self._by_name.get(path) or find_traces(path)[0]
        return explain_file(file, visit, options=self._options, progress=progress)

    def _visits_all(self, max_ranks: int | None) -> bool:
        return max_ranks is None or len(self.files) <= max_ranks

    def _outcomes(
        self, visit: Visit[_R] | None, progress: Progress | None = None
    ) -> Iterable[ExplainedFile[_R] | Exception]:
        if self.is_single:
            return [explain_file(self.files[0], visit, options=self._options, progress=progress)]
        max_rows = SHORT_ROWS if len(self.files) > MANY_RANKS else None
        read = partial(try_explain_file, visit=visit, options=self._options, max_rows=max_rows)
        return map_in_order(self._engine, read, self.files, progress)

    def _untraced(
        self, progress: Progress | None = None
    ) -> Iterable[RankWithoutTrace | Exception | None]:
        """What the ranks without a trace show; read by the same engine."""
        few = len(self.folders) <= _FEW_FOLDERS and not self._engine.collective
        engine = Here() if few else self._engine
        read = partial(summarise_rank, same_rank=self._job.same_rank)
        return map_in_order(engine, read, self.folders, progress)

    def _sort_out(
        self, outcomes: list[ExplainedFile[_R] | Exception]
    ) -> tuple[list[ExplainedFile[_R]], list[Exception]]:
        """Raises a failure when all files failed, or when the user named the file."""
        named = {named_file(path) for path in self.paths}
        explained: list[ExplainedFile[_R]] = []
        failures: list[Exception] = []
        for file, outcome in zip(self.files, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                explained.append(outcome)
            elif str(file) in named:
                raise outcome
            else:
                failures.append(outcome)
        if not explained:
            raise failures[0]
        return explained, failures

    def _judge(
        self,
        ranks: tuple[RankExplanation, ...],
        notes: list[Note],
        failures: list[Exception],
        split: SplitRanks,
    ) -> Explanation:
        if len(ranks) > 1:
            from stepscope.explain.snapshot_rank import refuse_mixtures

            refuse_mixtures(ranks)
        left_out = [Note(id="left-out", detail=str(error)) for error in failures]
        short = [Note(id="short-tables", detail=_SHORT_TABLES)]
        notes = [
            *notes,
            *left_out,
            *self._job.notes,
            *_read_run_notes(self._job),
            *(short if len(self.files) > MANY_RANKS else ()),
        ]
        notes += [*_note_attempts(ranks, split.others), *notes_on_untraced(split, len(ranks))]
        return judge(
            ranks,
            tuple(notes),
            _explain_nccl_logs(self.paths),
            _calibrations(ranks),
            split.others,
            split.untraced,
            _explain_server(self.paths),
        )


def _judge_alone(ranks: list[RankExplanation]) -> Explanation:
    numbered, notes = number_ranks(ranks)
    return judge(tuple(numbered), tuple(notes))


def _note_attempts(ranks: tuple[RankExplanation, ...], others: list[RankRun]) -> list[Note]:
    if not others:
        return []
    from stepscope.explain.whole_run.attempts import note_attempts

    return note_attempts([*(rank.run for rank in ranks if rank.run), *others])


def choose_ranks(explanation: Explanation, max_ranks: int) -> list[RankExplanation]:
    """The ranks worth a visit: those that findings name, then the first ones; in their order."""
    numbers = [finding.rank for finding in explanation.findings]
    if explanation.job:
        numbers += explanation.job.stragglers.accused
    named = [rank.path for number in numbers for rank in explanation.ranks if rank.rank == number]
    by_worth = dict.fromkeys([*named, *(rank.path for rank in explanation.ranks)])
    chosen = set([*by_worth][:max_ranks])
    return [rank for rank in explanation.ranks if rank.path in chosen]


def _read_run_notes(job: JobFolders) -> list[Note]:
    """About runs that are not over, were left open, or could not write everything."""
    if not job.runs:
        return []
    from stepscope.trace.run_state import absent_hosts, run_notes

    absent = absent_hosts(job.runs)
    notes = run_notes(*job.runs, ranks=job.ranks)
    return notes if absent is None else [*notes, absent]


def _calibrations(ranks: tuple[RankExplanation, ...]) -> tuple[Profile, ...]:
    """Calibrations of the first rank's host, which a bare trace does not name."""
    host = ranks[0].part.host
    if not host or len(ranks) == 1:
        return ()
    from stepscope.trace.profiles import find_calibrations

    return find_calibrations(host, ranks[0].kind)


def _explain_server(paths: Sequence[str | Path]) -> TogetherSummary | None:
    """What a parameter server recorded, when one of the run folders has one."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    if not any((folder / FOLDER).is_dir() for folder in folders):
        return None
    from stepscope.explain.server_rank import explain_together_folder

    return explain_together_folder(*folders)


def _explain_nccl_logs(paths: Sequence[str | Path]) -> NcclSummary | None:
    """NCCL's own logs, when one of the folders holds some."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    if not any(True for folder in folders for _ in folder.glob("*.log*")):
        return None
    from stepscope.explain.explain_nccl import explain_nccl

    return explain_nccl(*folders)
