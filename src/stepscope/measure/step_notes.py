"""What the training thread notes about its steps; step_clock.py turns notes into times.

The training thread only notes events with their times. The writer's thread attributes the time,
many steps at once. Between two notes the training evicts the processor's caches, so a line of
Python costs several times as much there as in a loop of its own.
"""

from __future__ import annotations

from typing import Any

# A phase begins (ENTER) and ends (LEAVE). A step ended (ENDED), or perhaps did (PERHAPS). The time
# since the last step's end was ours (AGAIN). A module enters training or evaluation mode (MODE). A
# data loader creates its iterator or fetches a batch (FETCH) and is done (FETCHED). Dynamo compiled
# some graphs (GRAPHS).
ENTER, LEAVE, ENDED, AGAIN, PERHAPS, MODE, FETCH, FETCHED, GRAPHS = range(9)

# An event, its time by the performance counter, and its subject: a phase, the step that ended, a
# fetch, the elements of a batch, a mode, a number of graphs.
Note = tuple[int, int, Any]

# Which loader fetches, whether it creates its iterator, and whether gradients are on.
Fetch = tuple[int, bool, bool]
# What FETCHED says when no batch came.
EXHAUSTED, NO_BATCH = -1, -2

# What only the training thread knows about a step that ends: its number, the wall clock, whether
# the profiler ran, the device's events around it, marks of what is unusual, whether the first
# PERHAPS since the previous step's end also ended a step, and what the system says (step_meter.py).
Ended = tuple[int, int, bool, Any, tuple[str, ...], bool, Any]
