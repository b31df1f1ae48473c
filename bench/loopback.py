"""What plain sockets move over loopback: the measure for what bench/checkpoint.py sees of backups.

Two flows at once, one in each direction, as when two machines keep each other's shards. A process
for each end; pieces as large as those of backups; memory that was touched before.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

FLOWS = 2
PIECE_BYTES = 4 << 20
BUFFER_BYTES = 64 << 20
"""Both ends go round in so much: more than the caches of a core hold."""


def throughput(bytes_per_flow: int) -> float:
    """Bytes per second of both flows together."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    ends = []
    for _ in range(FLOWS):
        listener = socket.create_server(("127.0.0.1", 0))
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        listener.close()
        ends.append(context.Process(target=_send, args=(sender, bytes_per_flow, theirs)))
        ends.append(context.Process(target=_receive, args=(receiver, bytes_per_flow, theirs)))
    for end in ends:
        end.start()
    times: list[tuple[float, float]] = [mine.recv() for _ in ends]
    for end in ends:
        end.join()
    took_s = max(ended for _, ended in times) - min(begun for begun, _ in times)
    return FLOWS * bytes_per_flow / took_s


def _send(connection: socket.socket, total: int, report: Connection) -> None:
    data = memoryview(bytes(BUFFER_BYTES))
    begun = time.monotonic()
    for at in range(0, total, PIECE_BYTES):
        start = at % BUFFER_BYTES
        connection.sendall(data[start : start + min(PIECE_BYTES, total - at)])
    report.send((begun, time.monotonic()))


def _receive(connection: socket.socket, total: int, report: Connection) -> None:
    data = memoryview(bytearray(BUFFER_BYTES))
    begun, done = time.monotonic(), 0
    while done < total:
        start = done % BUFFER_BYTES
        size = min(PIECE_BYTES, total - done, BUFFER_BYTES - start)
        done += connection.recv_into(data[start : start + size], size, socket.MSG_WAITALL)
    report.send((begun, time.monotonic()))
