"""explain_together: the ranks of a training job explain their own traces when it ends."""

from __future__ import annotations

import logging
from pathlib import Path

from stepscope.explain.engines import Here, TorchJob, import_distributed, own_group
from stepscope.explain.explain_job import JobTraces
from stepscope.records.explanation import Explanation


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
        logging.getLogger("stepscope").warning("explain_together: %s", error)
    return None
