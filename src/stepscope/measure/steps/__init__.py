"""Every step's times without the profiler: what the training thread notes, and the phases
that its time belongs to.
"""
