"""Measures ceilings: this machine's and, with several ranks, the group's.

A job of its own, never inside a training: it allocates, synchronises and keeps the device busy.
Only torch and the standard library are imported.
Raw times come out as plain values (`python -m stepscope.measure.calibrate` prints them as JSON);
predict fits models to them.

    settings.py     what to measure and for how long
    stopwatch.py    how long a call takes, on the host's clock or the device's
    ceilings.py     matmul rates, copy rates, the cost of a launch
    collectives.py  one call of each kind of collective
    groups.py       the world and the groups inside it, each under a name
    sweep.py        one collective over all sizes, in random order, pass after pass
    contention.py   an all-reduce and compute at the same time, on a CPU
    interleaved.py  several contenders over all sizes, in one random order
    laboratory.py   algorithms of collectives, the backend's own, and probes of the links
    job.py          join the other ranks, measure everything, leave
"""
