"""`explain --perfetto FILE`: the trace with our own tracks, for the Perfetto UI.

tracks.py       what we know about a rank as tracks: cycles, parts, idle causes, paths, findings
events.py       a track as events of the Chrome JSON format
write_trace.py  the trace's own text and ours in one file
"""
