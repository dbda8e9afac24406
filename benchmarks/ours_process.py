"""In one process: read a trace and explain it with stepscope; times go to stdout as JSON.

python ours_process.py FILE
"""

import json
import mmap  # noqa: F401  (imported before the clock starts, as HTA imports everything at once)
import sys
import time

import isal.isal_zlib  # noqa: F401

import stepscope.explain.memory.captured
import stepscope.explain.memory.traced
import stepscope.explain.strategies.data_parallel
import stepscope.explain.strategies.fully_sharded
import stepscope.explain.strategies.other
import stepscope.explain.strategies.pipeline
import stepscope.explain.strategies.tensor_parallel
import stepscope.trace.cache
import stepscope.trace.formats.kineto  # noqa: F401
from stepscope.explain.findings import load_rules
from stepscope.explain.rank import explain_rank
from stepscope.trace.read import read_trace

load_rules("rank")
began = time.perf_counter()
trace = read_trace(sys.argv[1])
loaded = time.perf_counter()
explain_rank(trace)
done = time.perf_counter()
print(json.dumps({"load_s": loaded - began, "explain_s": done - loaded, "events": trace.events}))
