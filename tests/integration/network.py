"""Hosts with networks of their own: namespaces joined by veth pairs and bridges, as root.

Used by test_network.py and by bench/detection.py. Every host is one network namespace with two
interfaces: eth0 for everybody, rail0 for training. The other end of each is a port of a leaf
switch, and the leaf switches of a network hang on one spine; all of these are bridges in a
namespace that is nobody's host. So links can be cut from outside and from inside, and switches can
fail, while processes, files and shared memory are this machine's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

ETH, RAIL = "eth0", "rail0"
_SUBNETS = {ETH: "10.78.0", RAIL: "10.79.0"}
_numbers = count()


class Network:
    """`hosts` hosts, spread over `leaves` leaf switches in order."""

    def __init__(self, hosts: int, leaves: int = 1) -> None:
        self.hosts = hosts
        self.leaves = leaves
        self._name = f"ev{os.getpid()}x{next(_numbers)}"
        self._wires = f"{self._name}w"
        self._instead: dict[int, tuple[Path, str]] = {}

    def build(self) -> None:
        run("ip", "netns", "add", self._wires)
        for interface in _SUBNETS:
            self._switches(interface)
        for host in range(self.hosts):
            self._add(host)

    def destroy(self) -> None:
        names = [self.namespace(host) for host in range(self.hosts)]
        for name in (*names, self._wires):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def namespace(self, host: int) -> str:
        return f"{self._name}h{host}"

    def address(self, host: int, interface: str = ETH) -> str:
        return f"{_SUBNETS[interface]}.{host + 1}"

    def leaf_of(self, host: int) -> int:
        return host * self.leaves // self.hosts

    def show(self, host: int, directory: Path, place: str) -> None:
        """Whatever is started on this host from now on finds that directory at this place."""
        self._instead[host] = directory, place

    def inside(self, host: int) -> list[str]:
        """What to put before a command to run it on this host."""
        words = ["ip", "netns", "exec", self.namespace(host)]  # mounts there are its own, too
        if host in self._instead:
            directory, place = self._instead[host]
            words += ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
            words += [str(directory), place]
        return words

    # --- what can happen to it ---

    def cut(self, host: int, interface: str = ETH) -> None:
        """The other end of its cable goes down: no carrier."""
        self._set(_port(host, interface), "down")

    def mend(self, host: int, interface: str = ETH) -> None:
        self._set(_port(host, interface), "up")

    def cut_inside(self, host: int, interface: str = ETH) -> None:
        """Its interface is set down on the host itself."""
        run(*self.inside(host), "ip", "link", "set", interface, "down")

    def switch_down(self, leaf: int, interface: str = ETH) -> None:
        """The leaf switch forwards nothing any more; the carriers of its ports stay."""
        self._set(_switch(leaf, interface), "down")

    # --- building ---

    def _switches(self, interface: str) -> None:
        spine = f"spine-{interface}"
        self._wire("link", "add", spine, "type", "bridge")
        self._set(spine, "up")
        for leaf in range(self.leaves):
            switch, up, down = (f"{part}{leaf}-{interface}" for part in ("leaf", "up", "down"))
            self._wire("link", "add", switch, "type", "bridge")
            self._set(switch, "up")
            self._wire("link", "add", up, "type", "veth", "peer", "name", down)
            self._set(up, "master", switch, "up")
            self._set(down, "master", spine, "up")

    def _add(self, host: int) -> None:
        name = self.namespace(host)
        run("ip", "netns", "add", name)
        run(*self.inside(host), "ip", "link", "set", "lo", "up")
        for interface in _SUBNETS:
            port = _port(host, interface)
            peer = ("peer", "name", interface, "netns", name)
            self._wire("link", "add", port, "type", "veth", *peer)
            self._set(port, "master", _switch(self.leaf_of(host), interface), "up")
            address = f"{self.address(host, interface)}/24"
            run(*self.inside(host), "ip", "address", "add", address, "dev", interface)
            run(*self.inside(host), "ip", "link", "set", interface, "up")

    def _set(self, link: str, *words: str) -> None:
        self._wire("link", "set", link, *words)

    def _wire(self, *words: str) -> None:
        run("ip", "netns", "exec", self._wires, "ip", *words)


def _port(host: int, interface: str) -> str:
    return f"h{host}-{interface}"


def _switch(leaf: int, interface: str) -> str:
    return f"leaf{leaf}-{interface}"


@contextmanager
def network(hosts: int, leaves: int = 1) -> Iterator[Network]:
    """The hosts; nothing of them is left, whatever happened."""
    made = Network(hosts, leaves)
    try:
        made.build()
        yield made
    finally:
        made.destroy()


def run(*words: str) -> str:
    """What the command printed; an AssertionError if it failed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
