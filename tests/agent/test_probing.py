"""The second path, between two real network namespaces whose link is pulled."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from everstep.agent.probing import Tried, reach

TRY = """
import asyncio, json, sys
from everstep.agent.probing import reach
print(json.dumps(asyncio.run(reach(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))))
"""
THERE = "198.51.100.2"
NOBODY = "198.51.100.3"


class Pair:
    """Two hosts with one cable."""

    def __init__(self) -> None:
        self.here, self.there = (f"everstep-{os.getpid()}-{name}" for name in "ab")

    def ip(self, *words: str, at: str = "") -> None:
        inside = ("-n", at) if at else ()
        subprocess.run(["ip", *inside, *words], check=True, capture_output=True)

    def plug(self) -> None:
        for name in (self.here, self.there):
            self.ip("netns", "add", name)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", self.there)
        self.ip("link", "add", "eth0", *cable, at=self.here)
        for name, address in ((self.here, "198.51.100.1"), (self.there, THERE)):
            self.ip("address", "add", f"{address}/24", "dev", "eth0", at=name)
            self.ip("link", "set", "eth0", "up", at=name)

    def unplug(self) -> None:
        for name in (self.here, self.there):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def reach(self, address: str, within_s: float) -> Tried:
        """As an agent on this side does."""
        argv = ["ip", "netns", "exec", self.here, sys.executable, "-c", TRY]
        argv += [address, "9", str(within_s)]
        shown = subprocess.run(argv, check=True, capture_output=True)
        return Tried(*msgspec.json.decode(shown.stdout))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        made.plug()
        yield made
    finally:
        made.unplug()


def test_a_host_that_answers_is_reached_until_its_cable_is_pulled(pair: Pair) -> None:
    tried = pair.reach(THERE, 10.0)
    assert tried == (True, f"{THERE} refused port 9")
    pair.ip("link", "set", "eth0", "down", at=pair.there)
    tried = pair.reach(THERE, 0.3)
    assert tried.reachable is False
    assert THERE in tried.why


def test_a_host_that_is_gone_is_not_reached(pair: Pair) -> None:
    assert pair.reach(NOBODY, 0.3).reachable is False
    pair.ip("route", "add", "unreachable", "203.0.113.9", at=pair.here)
    assert pair.reach("203.0.113.9", 10.0) == (False, "203.0.113.9:9: No route to host")
    assert pair.reach("192.0.2.1", 10.0) == (False, "192.0.2.1:9: Network is unreachable")


def test_a_port_that_somebody_listens_on_is_reached_without_a_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tried = asyncio.run(reach("127.0.0.1", port, 10.0))
        assert tried == (True, f"127.0.0.1:{port} took the connection")
        taken, _ = server.accept()
        with taken:
            assert taken.recv(1) == b""


@pytest.mark.parametrize("address", ["no-such-host.invalid", "not a host name", "a" * 70 + ".org"])
def test_a_name_that_leads_nowhere_says_nothing_of_its_host(address: str) -> None:
    tried = asyncio.run(reach(address, 9, 10.0))
    assert tried.reachable is None
    assert "could not be looked up" in tried.why
