"""SIGKILL of owner or peer at hundreds of random moments of a transfer."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from everstep.agent.transfer import client, talk
from everstep.agent.transfer.channel import Cancel
from everstep.agent.transfer.client import Client, Way
from everstep.agent.transfer.messages import TransferFailed
from everstep.checkpoint import slots
from everstep.checkpoint.format import Expected, Header
from everstep.checkpoint.kept import Kept
from everstep.checkpoint.slots import OpenSlot, ShardWriter, Writer
from everstep.model import NO_STEP, Generation, Peer, Rank
from everstep.paths import rank_shm
from tests.agent.support import wait_for
from tests.agent.transfer.ends import (
    OWNER,
    Machine,
    content,
    get_of,
    kept_steps,
    machine,
    peer_at,
    put_of,
    send,
    shared_memory,
)
from tests.checkpoint.lockstep import Counters, fork, kill

SIZE = 300_000
ROUNDS = 60

SEEDS = int(os.environ.get("EVERSTEP_SOAK_SEEDS", "2"))
"""`make soak` takes more."""


class Pair:
    """An owner that backs up one step after the other, and the peer that keeps them."""

    def __init__(self, shm: Path, seed: int) -> None:
        self.shm = shm
        self.rng = random.Random(seed)
        self.acknowledged = Counters(1, NO_STEP)
        """The newest step that the owner knows to be kept."""
        self.port = 0
        self.pids: dict[str, int] = {}

    def start(self) -> None:
        """Bring back who is missing."""
        if "peer" not in self.pids:
            ports = Counters(1, 0)
            self.pids["peer"] = fork(lambda: self._keep(ports))
            self.port = wait_for("the peer", lambda: ports.all()[0])
        if "owner" not in self.pids:
            self.pids["owner"] = fork(self._back_up)

    def kill_one_or_both(self) -> None:
        target = self.acknowledged.all()[0] + self.rng.randint(0, 2)
        wait_for(f"step {target}", lambda: self.acknowledged.all()[0] >= target)
        until = time.perf_counter() + self.rng.random() * 4e-3
        while time.perf_counter() < until:
            pass
        for name in self.rng.choice([["owner"], ["peer"], ["owner", "peer"], ["peer", "owner"]]):
            kill(self.pids.pop(name))

    def end(self) -> None:
        while self.pids:
            _, pid = self.pids.popitem()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _keep(self, ports: Counters) -> None:
        machine = Machine(self.shm, port=self.port)
        ports.finish(0, machine.server.port)
        while True:
            signal.pause()

    def _back_up(self) -> None:
        while True:
            safe = self.acknowledged.all()[0]
            with contextlib.suppress(TransferFailed):
                send(peer_at(self.port), put_of(safe + 1, SIZE, safe=safe))
                self.acknowledged.finish(0, safe + 1)


@pytest.fixture(params=range(SEEDS))
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """One owner and one peer for each seed."""
    monkeypatch.setattr(talk, "PIECE_BYTES", 16 << 10)
    monkeypatch.setattr(client, "RETRY_AFTER_S", (0.001,) * 50)
    with shared_memory() as shm:
        both = Pair(shm, request.param)
        yield both
        both.end()


def test_each_of_sixty_kills_of_a_pair_leaves_the_acknowledged_backup_whole_and_nothing_torn(
    pair: Pair,
) -> None:
    for _ in range(ROUNDS):
        pair.start()
        pair.kill_one_or_both()
        held = kept_steps(Kept(pair.shm))
        newest = pair.acknowledged.all()[0]
        assert newest == NO_STEP or newest in held
        assert max(held, default=newest) <= newest + 1


def fetch_for_ever(shm: Path, peer: Peer, fetched: Counters) -> None:
    """A newcomer: each step from the peer's memory into a slot, as agent/fetching.py does it."""
    writer = ShardWriter(shm, Writer(rank=Rank(0), world_size=4, generation=Generation(1)))
    while True:
        step = fetched.all()[0] + 1
        slots_taken: list[OpenSlot] = []

        def place(offered: Header, taken: list[OpenSlot] = slots_taken) -> memoryview:
            taken.append(writer.begin(offered.step, offered.payload_bytes))
            return taken[-1].payload

        got = Client(OWNER).fetch(peer, get_of(step % 2), place, Way(Cancel()))
        writer.commit(slots_taken[-1], got.header.digest, got.crc)
        fetched.finish(0, step)


def kill_in_a_fetch(pid: int, fetched: Counters, rng: random.Random) -> None:
    before = fetched.all()
    wait_for("a fetch", lambda: fetched.all() > before)
    until = time.perf_counter() + rng.random() * 4e-3
    while time.perf_counter() < until:
        pass
    kill(pid)


def test_each_of_sixty_kills_of_a_newcomer_leaves_only_whole_shards_in_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(talk, "PIECE_BYTES", 16 << 10)
    rng = random.Random(5)
    fetched = Counters(1, 0)
    torn = 0
    with machine() as peer, shared_memory() as shm:
        for step in (0, 1):
            send(peer.peer, put_of(step, SIZE))
        for _ in range(ROUNDS):
            kill_in_a_fetch(fork(partial(fetch_for_ever, shm, peer.peer, fetched)), fetched, rng)
            copies = slots.inventory(shm, [Rank(0)])
            for copy in copies:
                shard = slots.find(shm, Expected(step=copy.step, rank=Rank(0)))
                assert shard.payload == content(copy.step, SIZE)
            assert copies
            torn += len(copies) < len([*rank_shm(shm, Rank(0)).glob("slot-*")])
    assert torn > 0, "no kill fell into a fetch"
