"""`stepscope tune`: try remedies in short runs of the user's own command, and keep what wins.

plan.py lists what fits, trial_run.py runs one trial, journal.py keeps what is finished, search.py
decides what to try next and what to keep, tuning.py puts them together.
"""
