"""Frozen records that every room shares. Standard library and numpy only; no room's logic."""
