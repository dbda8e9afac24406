"""What applies and patches each change: one file per family, a `Fix` per change.

changes/ names these records; a file is imported when one of its changes is first asked for, and
torch only when it is applied. A library's own change is in `remedy.py` of its folder.
"""
