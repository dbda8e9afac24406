"""Frozen records that every room shares. Standard library and numpy only; no logic of a room."""
