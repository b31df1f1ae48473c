"""Takes samples inside a network namespace and makes traffic there, on orders from a test.

Run by netns.py as a process of its own (`ip netns exec`, which also shows the namespace's /sys).
An order is a line of JSON, and so is the answer.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import msgspec

from everstep.agent.checks.check import AnySource, Here
from everstep.agent.checks.net import SOURCES, reach
from everstep.model import Value

reach.ANSWER_WITHIN_S = 0.7  # a network without a wire answers at once, and silence must be short


class Order(Value, frozen=True, kw_only=True):
    """`do` is the name of a method of Inside, the rest are its arguments."""

    do: str
    name: str = ""
    here: Here = Here()
    to: tuple[str, int] = ("", 0)
    count: int = 0
    size: int = 0


class Inside:
    """Carries orders out."""

    def __init__(self) -> None:
        self._sources: dict[str, AnySource] = {}

    def sample(self, order: Order) -> Any:
        if order.name not in self._sources:
            make = {source.name: source for source in SOURCES}
            self._sources[order.name] = make[order.name]()
        return self._sources[order.name].sample(order.here)

    def forget_when(self, order: Order) -> None:
        """Let half a minute pass for the source that asks addresses."""
        source: Any = self._sources[order.name]
        source._asked = dict.fromkeys(source._asked, float("-inf"))

    def serve(self, order: Order) -> int:
        server = socket.create_server((order.to[0], 0))
        threading.Thread(target=swallow, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def datagrams(self, order: Order) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(order.count):
                sender.sendto(b"x" * order.size, order.to)

    def stream(self, order: Order) -> None:
        with socket.create_connection(order.to, timeout=20) as sender:
            for _ in range(order.count):
                sender.sendall(b"x" * order.size)


def swallow(server: socket.socket) -> None:
    while True:
        taken = server.accept()[0]
        while taken.recv(1 << 16):
            pass
        taken.close()


def main() -> None:
    inside = Inside()
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        answer = getattr(inside, order.do)(order)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
