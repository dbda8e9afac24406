"""Fewer bytes on the device."""
