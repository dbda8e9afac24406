"""Files -> columns: readers, links, the cache. Knows formats, not whether a number is good or bad.

Kineto JSON
  files.py          bytes of a plain, gzip or zstd file, in pieces; limits.py  how large they may be
  json_pieces.py    JSON text cut into pieces of whole events
  json_brackets.py  where an event ends, by its brackets
  outside_keys.py   the keys before and after the events
  events.py         one event as Kineto writes it, typed; which category is what
  recover.py        pieces -> events; of damaged ones, every event that can be read
  repair_json.py    text that is almost JSON -> JSON
  times.py          microseconds -> exact nanoseconds
  columns.py        events -> growing columns
  kineto.py         all of the above, joined: a Kineto JSON file -> a Trace
Nsight Systems
  database.py       the tables of a SQLite file as columns, in batches
  nsys_tables.py    the tables of an export -> columns; nsys_names.py  Nsight's numbers as names
  nsys_facts.py     rank, devices and clock of an export
  nsys.py           all of the above, joined: an Nsight Systems SQLite export -> a Trace
Every trace
  plausible.py      values that cannot be true become "not captured"
  links.py          parent, launch, forward of backward
  assemble.py       columns of any reader -> one sorted, linked Trace
  column_types.py   the types of a Trace's columns
  consistency.py    the rules that every Trace keeps
  cache.py          a Trace on disk, found again by the file's content; cache_entry.py  its format
  read.py           read_trace: recognise the format, use the cache
  layout.py discover.py remote.py   which files a path or URL stands for
Other files of a run
  regular_files.py  the only way to open a file; decode.py side_files.py  JSON as records
  rank_facts.py rank_folder.py measured_steps.py memory_file.py profiles.py  what capture and
                    calibrate wrote; run_state.py  whether the run was closed
  step_files.py     every step as columns; packed_steps.py  the packed parts of a long run
  nccl_log/         NCCL's own logs
  snapshot.py       a CUDA memory snapshot; snapshot_pickle.py pickle_tuples.py  its pickle, read
                    without running anything; snapshot_stacks.py  its Python stacks
Several ranks
  matching.py       the same collective on several ranks
  clocks.py         one clock for all ranks, with an error bar
"""
