"""FLOPs and bytes of operators, by formulas. Nothing here knows about time or devices."""
