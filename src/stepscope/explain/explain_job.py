"""Several trace files, one explanation.

Decide which files are one job and which rank each is; a worker reads each file; only summaries come
back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.engines import (
    Engine,
    Here,
    Pool,
    TorchJob,
    import_distributed,
    map_in_order,
    own_group,
)
from stepscope.explain.incomplete_ranks import (
    SplitRanks,
    gather_untraced,
    is_rank_folder,
    is_untimed,
    notes_on_untraced,
    split_attempts,
    summarise_rank,
)
from stepscope.explain.rank import ExplainedFile, Visit, explain_file, try_explain_file
from stepscope.explain.verdict import judge
from stepscope.records.explanation import Explanation, NcclSummary, RankExplanation
from stepscope.records.folders import SERVER_FOLDER
from stepscope.records.hardware import Profile
from stepscope.records.parameter_server import TogetherSummary
from stepscope.records.quality import Note
from stepscope.records.rank import RankWithoutTrace
from stepscope.records.run import RankRun
from stepscope.text.figures import long_duration
from stepscope.text.words import counted
from stepscope.trace.discover import (
    JobFolders,
    TraceFile,
    find_files_of_job,
    find_traces,
    join_folders,
    named_file,
)
from stepscope.trace.read import ReadOptions

if TYPE_CHECKING:
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


def explain_together(
    *paths: str | Path, cache: bool = True, timeout_s: float = 1800
) -> Explanation | None:
    """Explain when all ranks call it after a training: rank 0 gets the answer, others None.

    `paths` are those of `explain_job`; ranks that do not share a disk each give what they see. It
    never raises into the training: an error is logged, and the answer is None.
    """
    try:
        dist = import_distributed()
        if not dist.is_initialized():
            return JobTraces(paths, cache=cache, engine=Here()).explain()[0]
        with own_group(dist, timeout_s) as group:
            job = TorchJob(dist, group)
            traces = JobTraces(paths, cache=cache, engine=job)
            if job.leads:
                return traces.explain()[0]
            traces.take_part()
    except Exception as error:
        import logging

        logging.getLogger("stepscope").warning("explain_together: %s", error)
    return None


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
            from stepscope.explain.rank_without_steps import refuse_mixtures

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
    from stepscope.explain.whole_run.account import note_attempts

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
    from stepscope.trace.run_folder.run_state import absent_hosts, run_notes

    absent = absent_hosts(job.runs)
    notes = run_notes(*job.runs, ranks=job.ranks)
    return notes if absent is None else [*notes, absent]


def _calibrations(ranks: tuple[RankExplanation, ...]) -> tuple[Profile, ...]:
    """Calibrations of the first rank's host, which a bare trace does not name."""
    host = ranks[0].part.host
    if not host or len(ranks) == 1:
        return ()
    from stepscope.trace.machine_profiles import find_calibrations

    return find_calibrations(host, ranks[0].kind)


def _explain_server(paths: Sequence[str | Path]) -> TogetherSummary | None:
    """What a parameter server recorded, when one of the run folders has one."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    if not any((folder / SERVER_FOLDER).is_dir() for folder in folders):
        return None
    from stepscope.explain.rank_without_steps import explain_together_folder

    return explain_together_folder(*folders)


def _explain_nccl_logs(paths: Sequence[str | Path]) -> NcclSummary | None:
    """NCCL's own logs, when one of the folders holds some."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    if not any(True for folder in folders for _ in folder.glob("*.log*")):
        return None
    from stepscope.explain.nccl_logs import explain_nccl

    return explain_nccl(*folders)


# Whether bare traces that are explained together are one job: by what they say, not by being here.
#
# Ranks of one job have different numbers and run at the same time. A copy of a trace, or a cut one,
# has the same events; the whole one is explained.

INSTEAD = "explain each of them alone, or two with `stepscope compare A B`"
_CLOCKS_APART_NS = 60_000_000_000  # hosts' clocks may differ by this much
_SINCE_1970_NS = 10**17  # smaller times count from the start of a machine
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,8})(?!\d)", re.IGNORECASE)
_NAMED = 4


class SeveralJobsError(UsageError):
    """The traces are not one job; each job is explained alone."""

    def __init__(self, jobs: Sequence[Explanation], why: str) -> None:
        self.jobs, self.why = tuple(jobs), why
        traces = counted(sum(len(job.ranks) for job in jobs), "trace")
        super().__init__(f"these {traces} are not one job ({why}): {INSTEAD}")


class Grouped(NamedTuple):
    """The places of the ranks of each job, in their order, without copies."""

    jobs: list[list[int]]
    why: str  # the second is another job than the first
    notes: list[Note]


def group_jobs(ranks: Sequence[RankExplanation]) -> Grouped:
    """Ranks of run folders are one job, whose folders were compared before."""
    if any(map(is_untimed, ranks)):  # a snapshot among traces is refused elsewhere
        return Grouped([[*range(len(ranks))]], "", [])
    copies = _find_copies(ranks)
    jobs: list[_Job] = []
    why = ""
    for place, rank in enumerate(ranks):
        if place in copies:
            continue
        reasons = [job.why_not(rank) for job in jobs]
        if all(reasons):
            why = why or (reasons[0] if reasons else "")
            jobs.append(_Job())
        jobs[reasons.index("") if "" in reasons else -1].add(place, rank)
    return Grouped([job.places for job in jobs], why, _about_copies(ranks, copies))


class _Job:
    """Ranks that may be of one job: other numbers, one world size, the same time."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self._of_folder = False
        self._numbers: set[int] = set()
        self._worlds: set[int] = set()
        self._say_numbers = self._on_calendar = True  # all of them
        self._last_start_ns, self._first_end_ns = 0, 1 << 62

    def add(self, place: int, rank: RankExplanation) -> None:
        self.places.append(place)
        number = _number(rank)
        self._of_folder |= not _is_bare(rank)
        self._numbers |= set() if number is None else {number}
        self._worlds |= {rank.world_size} if rank.world_size else set()
        self._say_numbers &= rank.rank is not None
        self._on_calendar &= rank.timeline.start_ns >= _SINCE_1970_NS
        self._last_start_ns, self._first_end_ns = self._times_with(rank)

    def why_not(self, rank: RankExplanation) -> str:
        """Why this rank is of another job; "" if it may be of this one."""
        if self._of_folder and not _is_bare(rank):
            return ""
        if rank.world_size and self._worlds and rank.world_size not in self._worlds:
            return f"jobs of {min(self._worlds)} and of {counted(rank.world_size, 'rank')}"
        number = _number(rank)
        if number in self._numbers:
            return f"more than one says it is rank {number}"
        said = self._say_numbers and rank.rank is not None
        if said and not (self._on_calendar and rank.timeline.start_ns >= _SINCE_1970_NS):
            return ""
        start_ns, end_ns = self._times_with(rank)
        gap_ns = start_ns - end_ns
        apart = gap_ns > (_CLOCKS_APART_NS if said else 0)
        return f"they were recorded {long_duration(gap_ns)} apart" if apart else ""

    def _times_with(self, rank: RankExplanation) -> tuple[int, int]:
        """The last start and the first end."""
        start_ns = rank.timeline.start_ns
        end_ns = start_ns + rank.timeline.span_ns
        return max(self._last_start_ns, start_ns), min(self._first_end_ns, end_ns)


def rank_in_name(path: str) -> int | None:
    """The number of the rank in the name of the file or its folder."""
    file = Path(path)
    match = _RANK_IN_NAME.search(file.name) or _RANK_IN_NAME.search(file.parent.name)
    return int(match[1]) if match else None


def _is_bare(rank: RankExplanation) -> bool:
    """Whether only its trace says what it belongs to."""
    return not (rank.run or rank.part.member or rank.part.host)


def _number(rank: RankExplanation) -> int | None:
    return rank.rank if rank.rank is not None else rank_in_name(rank.path)


def _find_copies(ranks: Sequence[RankExplanation]) -> dict[int, int]:
    """Of each copy, the place of the trace that has more events, or came first."""
    alike: dict[object, list[int]] = {}
    copies: dict[int, int] = {}
    for place in sorted(range(len(ranks)), key=lambda place: -ranks[place].events):
        rank = ranks[place]
        if not _is_bare(rank) or not rank.timeline.span_ns:
            continue
        facts = (rank.kind, rank.device, rank.world_size, _number(rank))
        wholes = alike.setdefault(facts, [])
        whole = next((other for other in wholes if _is_copy(rank, ranks[other])), None)
        if whole is None:
            wholes.append(place)
        else:
            copies[place] = whole
    return copies


def _is_copy(rank: RankExplanation, whole: RankExplanation) -> bool:
    """Whether it holds events of the other one: it begins or ends to the nanosecond with it, or has
    steps of it."""
    (start, end), (first, last) = (
        (one.timeline.start_ns, one.timeline.start_ns + one.timeline.span_ns)
        for one in (rank, whole)
    )
    if start < first or end > last:
        return False
    steps, all_steps = (
        {(step.start_ns, step.dur_ns) for step in one.steps.steps} for one in (rank, whole)
    )
    return start == first or end == last or bool(steps and steps <= all_steps)


def _about_copies(ranks: Sequence[RankExplanation], copies: dict[int, int]) -> list[Note]:
    if not copies:
        return []
    named = [
        f"{ranks[copy].path} is a {'cut ' if ranks[copy].events < ranks[whole].events else ''}copy "
        f"of {ranks[whole].path}"
        for copy, whole in sorted(copies.items())[:_NAMED]
    ]
    more = f"; and {len(copies) - _NAMED} more" if len(copies) > _NAMED else ""
    traces = counted(len(copies), "trace is", "traces are")
    detail = f"{traces} given twice and counted once: {'; '.join(named)}{more}"
    return [Note(id="same-part-twice", detail=detail, count=len(copies))]


# The rank of each file: by its trace, else by its name, else by its place in the list.


def number_ranks(
    ranks: list[RankExplanation], untraced: Sequence[RankWithoutTrace] = ()
) -> tuple[list[RankExplanation], list[Note]]:
    """Every rank with a number, and notes about numbers that do not fit together. `untraced` are
    here as well, and have their numbers."""
    numbered = [
        rank if rank.rank is not None else replace(rank, rank=_number_in_name(rank.path, place))
        for place, rank in enumerate(ranks)
    ]
    # Whether these ran at the same time but not as one job, so that each says it is rank 0.
    members = [rank.part.member for rank in numbered]
    processes = {(rank.part.host, m.pid) for rank, m in zip(numbered, members, strict=True) if m}
    alone = all(member is not None and member.world_size == 1 for member in members)
    if alone and len(numbered) > 1 and len(processes) == len(numbered):
        places = sorted(range(len(ranks)), key=lambda i: _folder_order(ranks[i].path))
        for number, place in enumerate(places):
            name = f"process {number + 1}"
            numbered[place] = replace(numbered[place], rank=number, name=name)
    notes = [*_notes_on_numbers(numbered), *_notes_on_world_sizes(numbered, untraced)]
    return numbered, notes


def _number_in_name(path: str, place: int) -> int:
    number = rank_in_name(path)
    return place if number is None else number


def _notes_on_numbers(ranks: list[RankExplanation]) -> list[Note]:
    numbers = Counter(rank.rank for rank in ranks if rank.rank is not None)
    twice = sorted(number for number, count in numbers.items() if count > 1)
    if not twice:
        return []
    which = ", ".join(map(str, twice[:8]))
    return [Note(id="duplicate-ranks", detail=f"more than one file says it is rank {which}")]


def _notes_on_world_sizes(
    ranks: list[RankExplanation], untraced: Sequence[RankWithoutTrace]
) -> list[Note]:
    worlds = {rank.world_size for rank in ranks if rank.world_size}
    worlds |= {rank.part.world_size for rank in untraced if rank.part.world_size}
    here = len(ranks) + len(untraced)
    if len(worlds) > 1:
        detail = f"files of jobs with different world sizes: {sorted(worlds)}"
        return [Note(id="mixed-worlds", detail=detail)]
    if worlds and 1 < here < max(worlds):
        detail = f"{here:,} of {counted(max(worlds), 'rank')} are here"
        return [Note(id="missing-ranks", detail=detail)]
    return []


def _folder_order(path: str) -> tuple[int, str]:
    """rank-00000, rank-00000.2, ..., rank-00000.10: the order in which the processes started."""
    name = Path(path).parent.name
    return len(name), name
