"""Peak memory of a changed step, worked out from the captured backward graph."""
