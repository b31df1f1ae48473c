"""Backups by a real agent under its keeper: what it takes, offers, sends, and refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.actions import BackUpStep, ReleaseMachine
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.talk import Refused
from everstep.checkpoint.pins import Pins, pins_of
from everstep.checkpoint.slots import ShardWriter, Writer
from everstep.events import BackupFailed, MachineJoined, MachineReleased, StepBackedUp
from everstep.model import Copy, Generation, MachineId, Peer, Rank, Step
from tests.agent.fake_controller import MACHINE, TOKEN, FakeController
from tests.agent.support import Job, wait_for
from tests.agent.transfer.ends import content, kept_steps, machine, peer_at, put_of, send


class Owner:
    """A machine of a job of two, and its controller."""

    def __init__(self, root: Path) -> None:
        self.job = Job(root, f"k{os.getpid()}")
        self.job.describe(["true"], no_python=True, nnodes=2)
        self.controller = FakeController(self.job.paths)
        self.job.start("agent")
        self.joined = self.controller.get(MachineJoined)
        self.neighbour = Identity(TOKEN.encode(), self.job.uid, MachineId("m1"))

    @property
    def peer(self) -> Peer:
        """This machine, for others."""
        return peer_at(self.joined.shard_port, MACHINE)

    def another_agent(self) -> MachineJoined:
        """Kill the agent; what its successor says first."""
        known = {joined.agent for joined in self.controller.all(MachineJoined)}
        os.kill(self.job.pid("agent"), signal.SIGKILL)
        return self.controller.get(MachineJoined, lambda joined: joined.agent not in known)

    def back_up(self, step: int, to: Peer, order: str) -> BackUpStep:
        asked = BackUpStep(
            id=order,
            cause="test",
            why="a test",
            machine=MACHINE,
            generation=Generation(1),
            step=Step(step),
            safe=Step(5),
            peers=tuple(
                Peer(rank=Rank(rank), machine=to.machine, address=to.address, port=to.port)
                for rank in range(2)
            ),
        )
        self.controller.order(asked)
        return asked

    def save(self, step: int) -> None:
        for rank in map(Rank, range(2)):
            who = Writer(rank=rank, world_size=4, generation=Generation(1), backups=True)
            writer = ShardWriter(self.job.shm, who)
            slot = writer.begin(Step(step), 1000)
            slot.payload[:] = content(step, 1000, rank)
            writer.commit(slot, digest=0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.job.stop()
    made.controller.stop()


def kept(*steps: int) -> tuple[Copy, ...]:
    return tuple(Copy(rank=Rank(2), step=Step(s), generation=Generation(1)) for s in steps)


def test_what_an_agent_keeps_outlives_it_and_is_told_until_the_machine_is_released(
    owner: Owner,
) -> None:
    send(owner.peer, put_of(10, rank=2), me=owner.neighbour)
    again = owner.another_agent()
    assert (again.shard_port, again.backups) == (owner.joined.shard_port, kept(10))
    send(owner.peer, put_of(20, rank=2, safe=10), me=owner.neighbour)

    stopped = owner.controller.stop_ranks(2)
    assert stopped.backups == kept(10, 20)
    for _ in range(2):
        with pytest.raises(Refused, match="generation 1 is over, it is at generation 2"):
            send(owner.peer, put_of(30, rank=2, safe=20), me=owner.neighbour)
        owner.another_agent()
    assert owner.controller.stop_ranks(3).backups == kept(10, 20)

    owner.controller.order(ReleaseMachine(id="r", cause="test", why="test", machine=MACHINE))
    owner.controller.get(MachineReleased)
    wait_for("its shared memory to be gone", lambda: not owner.job.shm.exists())


def test_an_order_to_back_up_is_carried_out_and_answered_or_fails_with_a_sentence(
    owner: Owner,
) -> None:
    owner.save(5)
    owner.save(10)
    me = Identity(TOKEN.encode(), owner.job.uid, MachineId("m1"))
    with machine(me) as peer:
        to = peer_at(peer.server.port, me.machine)
        owner.back_up(10, to, order="b1")
        done = owner.controller.get(StepBackedUp)
        assert (done.action, done.step, done.sent_bytes) == ("b1", 10, 2000)
        assert [kept_steps(peer.kept, rank) for rank in range(2)] == [[10], [10]]
        assert pins_of(owner.job.shm, Rank(0)) == Pins(backup=Step(10), safe=Step(5))
    owner.back_up(11, to, order="b2")
    failed = owner.controller.get(BackupFailed)
    assert failed.reason == "rank 0 ended before it saved step 11"
    assert pins_of(owner.job.shm, Rank(0)) == Pins(safe=Step(5))
