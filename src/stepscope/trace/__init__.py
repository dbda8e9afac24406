"""Files -> columns: readers, links, the cache. Knows formats, not whether a number is good or bad.

Kineto JSON
Nsight Systems
Every trace
Other files of a run
Several ranks
"""
