"""NCCL's own logs: how the ranks are connected.

A log shows connections, not times, so findings from it have no share of the step.

groups.py    one communicator, put together from the logs of its ranks
evidence.py  the lines that findings show
"""
