"""What passing tensors between two processes costs on this machine, tried once when a run ends.

torch sends a tensor of a worker as a file descriptor: the training process connects to the worker's
socket, both prove that they know a key, and the memory is mapped. The same calls are made here in
one thread, on memory of our own, in about a hundredth of a second. Times are processor time.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import socket
from statistics import median
from time import perf_counter_ns, thread_time_ns

from stepscope.measure.never_raise import never_raise

_TIMES, _PAGES = 9, 256
_MESSAGE = b"x" * 48


@never_raise
def passing_costs() -> dict[str, int] | None:
    """For rank.json; None on systems other than Linux."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "send_fds"):
        return None
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("stepscope-pass-probe")
        stack.callback(os.close, memory)
        os.ftruncate(memory, 1)
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = f"\0stepscope-{os.getpid()}-{perf_counter_ns()}"
        server.bind(address)
        server.listen(1)
        handed = [_hand_over(server, address, memory) for _ in range(_TIMES)]
    pages = [_write_and_read() for _ in range(_TIMES)]
    return {
        "hand_over_ns": round(median(handed)),
        "write_page_ns": round(median(write for write, _ in pages)),
        "read_page_ns": round(median(read for _, read in pages)),
    }


def _hand_over(server: socket.socket, address: str, memory: int) -> int:
    began = thread_time_ns()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        accepted, _ = server.accept()
        with accepted:
            for _ in range(2):
                for sender, receiver in ((accepted, client), (client, accepted)):
                    sender.sendall(hmac.new(b"key", _MESSAGE, "sha256").digest())
                    receiver.recv(256)
            socket.send_fds(accepted, [b"f"], [memory])
            _, received, _, _ = socket.recv_fds(client, 1, 1)
            for descriptor in received:
                os.close(descriptor)
    return thread_time_ns() - began


def _write_and_read() -> tuple[float, float]:
    """One page of shared memory: to write it first, and to read and free it through another map."""
    page = mmap.PAGESIZE
    memory = os.memfd_create("stepscope-pass-probe")
    try:
        os.ftruncate(memory, _PAGES * page)
        began = thread_time_ns()
        with mmap.mmap(memory, _PAGES * page) as writing:
            for at in range(0, _PAGES * page, page):
                writing[at] = 1
            written = thread_time_ns()
            with mmap.mmap(memory, _PAGES * page) as reading:
                for at in range(0, _PAGES * page, page):
                    reading[at]
    finally:
        os.close(memory)
    return (written - began) / _PAGES, (thread_time_ns() - written) / _PAGES
