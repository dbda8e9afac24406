"""stepscope serve: the runs of a folder in a browser of this machine.

`listed_runs` finds run folders and remembers what is in them, `served_runs` has the heavy
work done by child processes (`worker`), `app` decides who may ask, `routes` answers, `live_routes`
follows running jobs. Run folders are only read; who asks a job for a window writes one file.
"""
