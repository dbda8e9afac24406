"""Measures ceilings: this machine's and, with several ranks, the group's.

A job of its own, never inside a training: it allocates, synchronises and keeps the device busy.
Only torch and the standard library are imported.
Raw times come out as plain values (`python -m stepscope.measure.calibrate` prints them as JSON);
predict fits models to them.
"""
