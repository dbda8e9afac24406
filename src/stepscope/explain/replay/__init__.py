"""The step as a graph that can be replayed: what waits for what, and what the profiler added.

graph.py      calls of the host and tasks of the device, as columns
build.py      a trace -> its graph
cpu_collectives.py  communication in a CPU's trace, and where the host waits for it
typical.py    one step that represents all
schedule.py   when each task would run
steady.py     the length of a step by running maxima, faster than the schedule
measured.py   the step fitted to steps measured without the profiler
overhead.py   the profiler's own cost, removed
cpu_overhead.py  the same, operator by operator, when the CPU is the device
"""
