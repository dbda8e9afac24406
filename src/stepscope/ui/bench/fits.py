"""Whether workloads fit the memory that is free here, said before anything runs.

A program of its own predicts (bench/predict_peak.py): it may hold a GPU and must give it back.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.figures import size
from stepscope.records.predicted_peak import LIMIT_S, PeakRequest, PredictedPeak
from stepscope.records.words import counted
from stepscope.ui.own_python import own_python

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.bench.task import BenchTask

_PROGRAM = own_python("stepscope.bench.predict_peak")
_START_S = 120.0  # that importing torch and starting CUDA may take


@dataclass(frozen=True, slots=True)
class PredictedPeaks:
    """Of the tasks of one bench."""

    by_request: dict[bytes, PredictedPeak] = field(default_factory=dict)

    def of(self, task: BenchTask) -> PredictedPeak | None:
        """None with remedies, which change what is held."""
        return None if task.remedies else self.by_request.get(_encode(task))


def worth_predicting(task: BenchTask) -> bool:
    """Workloads of the smallest size fit everywhere, unless somebody changes them."""
    return not task.remedies and (task.size != "tiny" or bool(task.changes))


def predict_peaks(tasks: Sequence[BenchTask]) -> PredictedPeaks:
    """Takes seconds for each; a training whose prediction crashes is left out."""
    waiting = list(dict.fromkeys(_encode(task) for task in tasks if worth_predicting(task)))
    known: dict[bytes, PredictedPeak] = {}
    while waiting:
        answers = _ask(waiting)
        known |= zip(waiting, answers, strict=False)
        waiting = waiting[len(answers) + 1 :]  # the next one ended the program
    return PredictedPeaks(known)


def too_large(peak: PredictedPeak) -> str:
    """needs about 96 GB on the GPU, 80 GB are free; --set batch=24 would fit."""
    where = "on the GPU" if peak.device == "cuda" else "of memory"
    each = f" for each of {counted(peak.ranks, 'rank')}" if peak.ranks > 1 else ""
    words = f"needs about {size(peak.peak_bytes or 0)} {where}{each}, "
    words += f"{size(peak.free_bytes or 0)} are free"
    if peak.fitting_batch is None:
        return f"{words}. Even a small batch does not fit"
    return f"{words}. --set batch={peak.fitting_batch} fits"


def _ask(requests: Sequence[bytes]) -> list[PredictedPeak]:
    """As many as were answered before the program ended, in order."""
    limit_s = _START_S + LIMIT_S * len(requests)
    try:
        output = subprocess.run(
            _PROGRAM, input=b"\n".join(requests), capture_output=True, timeout=limit_s, check=False
        ).stdout
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
    answers = []
    for line in output.splitlines():
        try:
            answers.append(msgspec.json.decode(line, type=PredictedPeak))
        except msgspec.DecodeError:
            continue  # a workload's own output
    return answers


def _encode(task: BenchTask) -> bytes:
    request = PeakRequest(
        name=task.workload.name, size=task.size, changes=dict(task.changes), ranks=task.ranks
    )
    return msgspec.json.encode(request)
