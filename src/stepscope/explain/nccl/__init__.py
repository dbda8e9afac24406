"""NCCL's own logs: which way the ranks talk, and what is odd about it.

A log knows ways and not times: a finding here has no share of the step. `explain_nccl` is what a
job's explanation holds; nccl_calls.py gives a trace's calls the algorithm that a log names.

groups.py    one communicator over the logs of its ranks
evidence.py  the lines that findings rest on
ways.py      nccl-socket-fallback, nccl-no-p2p
channels.py  nccl-unequal-channels
warnings.py  nccl-warnings
judge.py     all findings
summary.py   all of it, for a job
"""

from stepscope.explain.nccl.judge import FINDINGS, judge_nccl
from stepscope.explain.nccl.summary import explain_nccl

__all__ = ["FINDINGS", "explain_nccl", "judge_nccl"]
