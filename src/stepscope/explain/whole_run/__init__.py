"""Every step of a run, not only those of the profiler's window: what a step costs on average.

stalls.py         typical steps and stalls; the mean step is the sum of both, exactly
level_changes.py  where the typical step changed for good
periods.py        whether stalls come at a fixed distance
trends.py         whether steps grow with time, or with what they are fed
"""
