"""stepscope serve: the runs of a folder in a browser of this machine.

`runs_directory` finds run folders, `run_index` remembers what is in them, `worker_process` reads
and predicts in a child process, `guard` decides who may ask, `app` answers. Run folders are only
read, never written.
"""
