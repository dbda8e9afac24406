"""What NCCL (or RCCL) writes under NCCL_DEBUG=INFO -> who talks to whom, over what, every call.

One pass over the file; what stays is a row of numbers a call and a few records a process. Lines of
several processes may be mixed: each begins with host:pid:tid. Most lines do not say which
communicator they are about: then the thread that initialises one, else the rank, decides.

find.py       which files are NCCL's logs
lines.py      what its lines look like
processes.py  processes and communicators while their lines come in
calls.py      calls as rows of numbers, and the algorithms of them
read.py       all of it: a log read in one pass
"""

from stepscope.trace.nccl_log.find import find_nccl_logs, is_nccl_log
from stepscope.trace.nccl_log.read import read_nccl_log

__all__ = ["find_nccl_logs", "is_nccl_log", "read_nccl_log"]
