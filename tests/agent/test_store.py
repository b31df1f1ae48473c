"""Ranks that are faster than rank 0: they wait for its store instead of being refused by it."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
import time
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from everstep.agent.store import await_store

HOST = "127.0.0.1"


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What torch's rendezvous would have created, in order. The module is a stand-in for it."""
    calls: list[tuple[str, Any]] = []
    rendezvous = ModuleType("torch.distributed.rendezvous")
    vars(rendezvous)["TCPStore"] = lambda **kwargs: calls.append(("created", kwargs["is_master"]))
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", rendezvous)
    await_store()
    return calls


def create(port: int, *, is_master: bool, timeout_s: float = 60.0) -> None:
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    timeout = timedelta(seconds=timeout_s)
    vars(rendezvous)["TCPStore"](host_name=HOST, port=port, is_master=is_master, timeout=timeout)


def bound() -> socket.socket:
    """A port that refuses connections until it listens."""
    server = socket.socket()
    server.bind((HOST, 0))
    return server


def test_a_client_connects_only_when_the_store_listens(created: list[tuple[str, Any]]) -> None:
    with bound() as server:
        port = server.getsockname()[1]
        client = threading.Thread(target=create, args=(port,), kwargs={"is_master": False})
        client.start()
        refused = 0
        while refused < 3:  # as the client is, meanwhile
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port))
            refused += 1
        created.append(("listening", None))
        server.listen()
        client.join(timeout=60)
    assert created == [("listening", None), ("created", False)]


def test_the_store_itself_waits_for_nobody(created: list[tuple[str, Any]]) -> None:
    with bound() as server:
        create(server.getsockname()[1], is_master=True)
    assert created == [("created", True)]


def test_a_store_that_never_listens_is_left_to_torch(created: list[tuple[str, Any]]) -> None:
    with bound() as server:
        began = time.monotonic()
        create(server.getsockname()[1], is_master=False, timeout_s=0.05)
        assert time.monotonic() - began >= 0.05
    assert created == [("created", False)]


def test_torch_has_the_names_that_this_hangs_on() -> None:
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    before = rendezvous.TCPStore
    try:
        await_store()
        assert rendezvous.TCPStore is not before
    finally:
        rendezvous.TCPStore = before
