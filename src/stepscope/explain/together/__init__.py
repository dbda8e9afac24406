"""Training through a parameter server: who waits, how stale reads are, and whether it pays.

own_times.py     the workers' steps, and what of them is their own
summary.py       the whole run
straggling.py    the slowest worker at every step, on average, and when nobody waits: three bounds
"""
