"""Files -> columns: readers, links, the cache. Knows formats; knows nothing of what is good or bad.

files.py     bytes of a plain, gzip or zstd file, in pieces
text.py      JSON text cut into pieces of whole events, with the keys around them
mend.py      text that is almost JSON -> JSON
events.py    one event as Kineto writes it, typed; which category is what
recover.py   damaged pieces: keep every event that can be kept, count the rest
columns.py   pieces of events -> growing columns
kineto.py    all of the above, joined: a Kineto JSON file -> a Trace
database.py  the tables of a SQLite file as columns, in batches
nsys_words.py  what the numbers and texts of an Nsight Systems export mean
nsys.py      the two above, joined: an Nsight Systems SQLite export -> a Trace
links.py     parent, launch, forward of backward
assemble.py  columns of any reader -> one sorted, linked Trace
cache.py     a Trace on disk, found again by the file's content
read.py      read_trace: recognise the format, use the cache
snapshot.py  a CUDA memory snapshot, snapshot_pickle.py the plain data in it: nothing is run
regular_files.py    the one way to open a file; decode.py side_files.py   JSON of others as records
rank_facts.py rank_folder.py truth.py memory_file.py profiles.py   what capture and calibrate wrote
nccl_log/    NCCL's own logs
matching.py  the same collective on several ranks
clocks.py    one clock for all ranks, with an error bar
layout.py    names in a folder of traces
remote.py    traces behind a URL
discover.py  which files a path or URL stands for
"""
