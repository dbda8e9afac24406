"""What NCCL (or RCCL) logs under NCCL_DEBUG=INFO: which ranks talk to which, and over what.

One pass over the file. Lines of several processes may be mixed: each begins with host:pid:tid. Most
lines do not name their communicator: then the thread that initialises one, or the rank, decides.
"""

from stepscope.trace.nccl_log.lines import find_nccl_logs, is_log_name, is_nccl_log
from stepscope.trace.nccl_log.read import read_nccl_log

__all__ = ["find_nccl_logs", "is_log_name", "is_nccl_log", "read_nccl_log"]
