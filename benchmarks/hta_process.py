"""In one process: read a trace with traceinsight and run what `explain` computes.

Temporal breakdown, idle time breakdown and kernel breakdown, with HTA's defaults and no plots;
times go to stdout as JSON. Runs in the peer's own environment: nothing of ours is imported.

    python hta_process.py FILE
"""

import json
import logging
import sys
import time
import warnings

from hta.trace_analysis import TraceAnalysis

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
began = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
loaded = time.perf_counter()
analysis.get_temporal_breakdown(visualize=False)
analysis.get_idle_time_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
done = time.perf_counter()
print()
print(json.dumps({"load_s": loaded - began, "explain_s": done - loaded}))
