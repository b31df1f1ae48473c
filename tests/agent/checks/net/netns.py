"""A host and its switch as network namespaces: real interfaces, a real bridge, a real gateway.

Needs root, as the kernel's own tests do. Everything is gone when the namespaces are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

import everstep
from everstep.agent.checks.check import Here
from tests.agent.checks.net.in_namespace import Order

ROOT = Path(__file__).parents[4]
GATEWAY, HOST, FAR = "10.77.0.1", "10.77.0.2", "10.77.0.3"
GATEWAY6, HOST6 = "fd77::1", "fd77::2"
Sample = TypeVar("Sample")


def ip(*words: str, namespace: str = "") -> None:
    where = ["-n", namespace] if namespace else []
    subprocess.run(["ip", *where, *words], check=True, capture_output=True, timeout=20)


class Namespace:
    """One machine of the network, with a process inside it."""

    def __init__(self, name: str) -> None:
        self.name = f"{name}{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        ip("netns", "add", self.name)
        self.ip("link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=20)
        ip("netns", "del", self.name)

    def ip(self, *words: str) -> None:
        ip(*words, namespace=self.name)

    def tc(self, words: str) -> None:
        argv = ["tc", "-n", self.name, *words.split()]
        subprocess.run(argv, check=True, capture_output=True, timeout=20)

    def set(self, name: str, value: str) -> None:
        argv = ["ip", "netns", "exec", self.name, "sh", "-c", f"echo '{value}' > /proc/sys/{name}"]
        subprocess.run(argv, check=True, timeout=20)

    def order(self, do: str, kind: type[Sample] | None = None, **more: Any) -> Sample:
        """Have the process inside do something, and wait for its answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(Order(do=do, **more)) + b"\n")
        process.stdin.flush()
        return msgspec.json.decode(process.stdout.readline(), type=kind or Any)

    def sample(self, name: str, kind: type[Sample], here: Here | None = None) -> Sample:
        return self.order("sample", kind, name=name, here=here or Here())

    def _start(self) -> subprocess.Popen[bytes]:
        module = "tests.agent.checks.net.in_namespace"
        path = f"{Path(everstep.__file__).parents[1]}:{ROOT}"
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self._process


class Network:
    """`host` has eth0, with its default routes by `switch`, where it is plugged into "port"."""

    def __init__(self, host: Namespace, switch: Namespace) -> None:
        self.host = host
        self.switch = switch

    def build(self) -> None:
        self.switch.ip("link", "add", "br0", "type", "bridge")
        self.switch.ip("addr", "add", f"{GATEWAY}/24", "dev", "br0")
        self.switch.ip("addr", "add", f"{GATEWAY6}/64", "dev", "br0", "nodad")
        self.switch.ip("link", "set", "br0", "up")
        self.plug(self.host, "port", "eth0")
        self.host.ip("addr", "add", f"{HOST}/24", "dev", "eth0")
        self.host.ip("addr", "add", f"{HOST6}/64", "dev", "eth0", "nodad")
        self.host.ip("route", "add", "default", "via", GATEWAY)
        self.host.ip("-6", "route", "add", "default", "via", GATEWAY6)

    def plug(self, machine: Namespace, port: str, interface: str) -> None:
        peer = ("peer", "name", interface, "netns", machine.name)
        self.switch.ip("link", "add", port, "type", "veth", *peer)
        self.switch.ip("link", "set", port, "master", "br0", "up")
        machine.ip("link", "set", interface, "up")

    def cut(self) -> None:
        self.switch.ip("link", "set", "port", "down")

    def mend(self) -> None:
        self.switch.ip("link", "set", "port", "up")
