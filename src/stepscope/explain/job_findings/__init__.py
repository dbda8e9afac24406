"""What is worth knowing about ranks together, one file a finding; its id is its file's name.

Each file has `find(job, strategies) -> Finding | None`, and a page of its name in docs/findings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.job_findings import (
    not_training_together,
    pipeline_bubble,
    straggler,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Finding
    from stepscope.records.job import Job
    from stepscope.records.strategies import Strategy

_ALL = (not_training_together, straggler, pipeline_bubble)


def find_in_job(job: Job, strategies: Sequence[Strategy]) -> tuple[Finding, ...]:
    """What the ranks' own findings cannot say."""
    return tuple(finding for module in _ALL if (finding := module.find(job, strategies)))
