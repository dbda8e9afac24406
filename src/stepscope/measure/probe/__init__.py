"""Times single operators on the device at hand: runs in a child process of `stepscope probe`."""
