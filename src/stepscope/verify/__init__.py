"""A against B: did it really change, and did it keep what was promised?

`compare` is the whole of it; change, spread and correlation are the statistics, runs and step_lists
what is read, moved and workload what differs, track_record what was promised and what came of it.
Nothing here starts a process: `ui` runs commands and hands their run folders over.
"""
