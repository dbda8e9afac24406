"""Training through a parameter server, simulated from measured step times.

resample.py    new runs drawn from the measured one, a block of steps at a time
clocks.py      when every worker starts and ends each of its steps, if servers are never busy
queued.py      the same with servers that serve one request after the other
promise.py     what a consistency would give: updates per second, staleness, time blocked
"""
