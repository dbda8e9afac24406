"""The step as a graph that can be replayed: who waits for whom, and what the profiler added.

graph.py      calls of the host and tasks of the device, as columns
build.py      a trace -> its graph
beside.py     communication of a CPU's trace, and where the host waits for it
typical.py    one step that stands for all
schedule.py   when each task would run
overhead.py   the profiler's own cost, taken out
cpu_overhead.py  the same, operator by operator, where the CPU is the device
"""
