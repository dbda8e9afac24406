"""One trace, ours against the peer: what was measured, and the ratios."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from process import environment, run
from targets import CACHED, IN_PROCESS, PEAK, WHOLE, Result, geometric_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from process import Run

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians. The peer's numbers are None if it failed or did not run."""

    name: str
    events: int
    whole_s: float
    load_s: float
    explain_s: float
    peak_bytes: int
    second_load_s: float
    text_bytes: int  # decompressed
    cached: bool  # small files are faster to read than a cache entry
    peer_whole_s: float | None = None
    peer_load_s: float | None = None
    peer_explain_s: float | None = None
    peer_peak_bytes: int | None = None
    peer_failure: str | None = None

    @property
    def in_process_s(self) -> float:
        return self.load_s + self.explain_s

    @property
    def peer_in_process_s(self) -> float | None:
        if self.peer_load_s is None or self.peer_explain_s is None:
            return None
        return self.peer_load_s + self.peer_explain_s

    @property
    def whole_ratio(self) -> float | None:
        return _over(self.peer_whole_s, self.whole_s)

    @property
    def in_process_ratio(self) -> float | None:
        return _over(self.peer_in_process_s, self.in_process_s)

    @property
    def peak_ratio(self) -> float | None:
        return self.peak_bytes / self.peer_peak_bytes if self.peer_peak_bytes else None

    @property
    def cached_ratio(self) -> float | None:
        return self.load_s / self.second_load_s if self.cached else None


def _over(theirs: float | None, ours: float) -> float | None:
    return None if theirs is None else theirs / ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Which interpreters to run, and their time limit."""

    ours: str
    peer: str | None
    timeout_s: float

    def measure(self, trace: Path, repeats: int) -> Measurement:
        """Every number from fresh processes, ours and the peer's in turns."""
        warm(trace)
        rounds: list[dict[str, Any]] = []
        peers: list[Run] = []
        failure = None
        for _ in range(repeats):
            rounds.append(self._round(trace, ask_peer=failure is None))
            peers += filter(None, (rounds[-1]["peer"],))
            failure = next((each.failure for each in peers if each.failure), None)
        return Measurement(
            name=trace.name.removesuffix(".gz").removesuffix(".json"),
            events=rounds[0]["first"]["events"],
            whole_s=median(r["whole"].wall_s for r in rounds),
            load_s=median(r["first"]["load_s"] for r in rounds),
            explain_s=median(r["first"]["explain_s"] for r in rounds),
            peak_bytes=int(median(r["whole"].peak_bytes for r in rounds)),
            text_bytes=text_bytes(trace),
            second_load_s=median(r["second"]["load_s"] for r in rounds),
            cached=all(r["cached"] for r in rounds),
            peer_failure=failure,
            **({} if failure or not peers else _peer_medians(peers)),
        )

    def _round(self, trace: Path, *, ask_peer: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as cold, tempfile.TemporaryDirectory() as filled:
            whole = self._ours(cold, "-m", "stepscope", "explain", "--json", str(trace))
            peer = self._peer(trace) if ask_peer else None
            inside = (str(HERE / "ours_process.py"), str(trace))
            first = _printed(self._ours(filled, *inside, keep_output=True))
            cached = any(Path(filled).iterdir())
            second = _printed(self._ours(filled, *inside, keep_output=True))
        return {"whole": whole, "peer": peer, "first": first, "second": second, "cached": cached}

    def _ours(self, cache: str, *arguments: str, keep_output: bool = False) -> Run:
        env = environment(STEPSCOPE_CACHE_DIR=cache)
        done = run((self.ours, *arguments), env, keep_output=keep_output, timeout_s=self.timeout_s)
        if done.failure:
            raise SystemExit(f"stepscope failed on {arguments[-1]}: {done.failure}")
        return done

    def _peer(self, trace: Path) -> Run | None:
        if self.peer is None:
            return None
        command = (self.peer, str(HERE / "hta_process.py"), str(trace))
        env = environment(PYTHONPATH=None)
        return run(command, env, keep_output=True, timeout_s=self.timeout_s)


def _peer_medians(peers: Sequence[Run]) -> dict[str, Any]:
    printed = [_printed(each) for each in peers]
    return {
        "peer_whole_s": median(each.wall_s for each in peers),
        "peer_load_s": median(each["load_s"] for each in printed),
        "peer_explain_s": median(each["explain_s"] for each in printed),
        "peer_peak_bytes": int(median(each.peak_bytes for each in peers)),
    }


def _printed(done: Run) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
    return said


def warm(path: Path) -> None:
    """Put the file into the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def text_bytes(path: Path) -> int:
    """How long the trace's text is without compression."""
    opens = gzip.open if path.suffix == ".gz" else Path.open
    size = 0
    with opens(path, "rb") as file:
        while block := file.read(1 << 20):
            size += len(block)
    return size


def speed(rows: Sequence[Measurement]) -> str:
    """Return how fast all traces together are read: text and events."""
    load_s = sum(row.load_s for row in rows)
    text, events = sum(row.text_bytes for row in rows), sum(row.events for row in rows)
    return f"Reading: {text / load_s / 1e6:.0f} MB/s, {events / load_s / 1e6:.2f} million events/s"


def ratios(
    rows: Sequence[Measurement], ratio: Callable[[Measurement], float | None]
) -> list[float]:
    """One ratio, over the traces that have it and that both tools can read."""
    known = [ratio(row) for row in rows if row.peer_failure is None]
    return [each for each in known if each is not None]


def summary(rows: Sequence[Measurement]) -> tuple[Result, ...]:
    """The four means that have targets; those without any measurement are left out."""
    means = (
        (WHOLE, lambda row: row.whole_ratio),
        (IN_PROCESS, lambda row: row.in_process_ratio),
        (PEAK, lambda row: row.peak_ratio),
        (CACHED, lambda row: row.cached_ratio),
    )
    every = (Result(target=t, value=geometric_mean(ratios(rows, of))) for t, of in means)
    return tuple(result for result in every if not math.isnan(result.value))
