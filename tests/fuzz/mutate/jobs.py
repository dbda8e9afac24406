"""Jobs of several ranks, of which one or more have damaged traces or lack parts."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.mutate.traces import damage_trace
from fuzz.odd_json import text
from jobs import Fault, Plan, make_job
from jobs_files import write_job

if TYPE_CHECKING:
    from random import Random

_PLANS = (
    Plan(ranks=2, steps=4, form="ddp", noise=0.05),
    Plan(ranks=3, steps=4, backend="gloo", fault=Fault(cause="compute", size=1.4, place=2)),
    Plan(ranks=2, steps=4, form="fsdp"),
    Plan(ranks=2, steps=4, form="tensor", tensor_ranks=2),
    Plan(ranks=4, steps=3, form="mixed", tensor_ranks=2),
    Plan(ranks=2, steps=4, form="gpipe", stages=2),
    Plan(ranks=2, steps=4, form="1f1b", stages=2, backend="gloo"),
)


_HOME = tempfile.TemporaryDirectory(prefix="fuzz-jobs-")  # removed at exit


@cache
def seeds() -> tuple[Path, ...]:
    """Each plan's run folder, and the same without what was measured beside the traces."""
    home = Path(_HOME.name)
    folders = []
    for number, plan in enumerate(_PLANS):
        for beside in (True, False):
            folder = home / f"{number}-{beside}"
            write_job(folder, make_job(plan), run_folder=beside)
            folders.append(folder)
    return tuple(folders)


def mutate(rng: Random, folder: Path) -> Path:
    job = folder / "job"
    shutil.copytree(rng.choice(seeds()), job)
    traces = sorted(job.rglob("*.json.gz"))
    for path in rng.sample(traces, rng.randrange(1, len(traces) + 1)):
        if rng.random() < 0.1:
            path.unlink()
            continue
        trace = json.loads(gzip.decompress(path.read_bytes()))
        damage_trace(rng, trace)
        path.write_bytes(gzip.compress(text(trace), 1))
    return job
