"""The machinery of `stepscope bench`: workloads run under capture, explained, and put in a table.

command.py   the training command of one row
runs.py      one run of it under capture
metrics.py   runs of one row -> its result
suite.py     all rows, in turns, with partial results when it is interrupted
machine.py   where it was measured, and the clocks
"""
