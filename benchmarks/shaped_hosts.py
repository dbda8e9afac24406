"""One rank on each of two hosts made of namespaces, joined by links of a limited rate.

The laboratory is that of the tests (tests/hosts/lab.py; needs root).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/hosts"))

from lab import Lab
from lab import why_not as why_not

HOSTS = ("node0", "node1")


def first_ranks_answer(
    workload: Path, arguments: list[str], rate: str, links: int = 1
) -> dict[str, Any]:
    """The last line that rank 0 prints, as JSON; SystemExit with the end of stderr on failure."""
    with Lab(hosts=len(HOSTS), links=links) as lab:
        for name in HOSTS:
            for link in range(links):
                lab.shape(name, rate, link=link)
        job = lab.torchrun([str(workload), *arguments])
        outcomes = [process.wait() for process in job.values()]
    for outcome in outcomes:
        if outcome.code:
            raise SystemExit(f"a rank ended with {outcome.code}:\n{outcome.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(outcomes[0].stdout.splitlines()[-1])
    return answer
