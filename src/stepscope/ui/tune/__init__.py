"""`stepscope tune`: try remedies in short runs of the user's own command, and keep what wins.

plan.py lists what fits, trials.py runs a trial, search.py decides what to try next and what to
keep, tuning.py puts them together.
"""
