"""`explain --perfetto FILE`: the trace with our own tracks, for the Perfetto UI.

tracks.py       what we know about a rank as tracks: cycles, parts, idle causes, paths, findings
path_track.py   the critical path, with what the host did on it
events.py       a track as events of the Chrome JSON format
write_trace.py  the trace's own text and ours in one file
"""
