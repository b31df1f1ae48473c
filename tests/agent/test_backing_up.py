"""The agent's part in backups and in restores from them: several machines, real transfers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.actions import BackUpStep, StartRanks
from everstep.agent import backing_up
from everstep.agent.fetching import NotFetched
from everstep.agent.saved import Saves
from everstep.agent.shards import Shards
from everstep.agent.this_machine import ThisMachine
from everstep.agent.transfer import client
from everstep.checkpoint import disk, slots
from everstep.checkpoint.format import PAGE, Expected
from everstep.checkpoint.pins import Pins, pins_of
from everstep.checkpoint.slots import ShardWriter, Writer
from everstep.events import BackupFailed, StepBackedUp
from everstep.model import (
    NO_STEP,
    CheckpointSpec,
    Copy,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    NodeRank,
    Peer,
    Rank,
    Step,
)
from everstep.paths import JobPaths, MachineSetup, rank_shm, shm_dir
from tests.checkpoint.plain import digest

GENERATION = Generation(1)
WORLD = 4
SIZE = 5000


def content(rank: int, step: int) -> bytes:
    return (f"rank {rank} step {step} ".encode() * SIZE)[:SIZE]


class Host:
    """One machine of a job of two with two ranks each: its ranks are writers without processes."""

    def __init__(self, root: Path, name: str, node_rank: int, interface: str = "") -> None:
        job = JobId("job")
        spec = JobSpec(
            job=job,
            uid=f"b{os.getpid()}",
            command=("train.py",),
            working_dir=str(root),
            nnodes=2,
            nproc_per_node=2,
            checkpoint=CheckpointSpec(
                directory=str(root / "checkpoints"), backup_interface=interface
            ),
        )
        setup = MachineSetup(
            job=job,
            uid=spec.uid,
            machine=MachineId(name),
            address="127.0.0.1",
            host="testhost",
            job_dir=str(root / job),
            nproc_per_node=2,
        )
        paths = JobPaths(root, job)
        paths.root.mkdir(exist_ok=True)
        paths.token.write_text("secret\n")
        shm = shm_dir(job, spec.uid, setup.machine)
        machine = paths.machine(setup.machine)
        self.here = ThisMachine(setup=setup, spec=spec, job=paths, paths=machine, shm=shm)
        self.ranks = [Rank(2 * node_rank), Rank(2 * node_rank + 1)]
        self.node_rank = NodeRank(node_rank)
        self.running = True
        self.communicating = False
        self.shards = self.agent()
        self._writers: dict[Rank, ShardWriter] = {}

    def agent(self, port: int = 0) -> Shards:
        """What a new agent process of this machine has."""
        saves = Saves(self.here.shm, lambda: self.running)
        self.shards = Shards(self.here, saves, lambda: 0.25, port, lambda: self.communicating)
        self.shards.open(Generation(0))
        return self.shards

    def save(self, step: int, ranks: Sequence[Rank] = ()) -> None:
        for rank in ranks or self.ranks:
            writer = self._writers.get(rank)
            if writer is None:
                writer = self._writers[rank] = ShardWriter(self.here.shm, self.writer(rank))
                writer.reserve(SIZE)
            slot = writer.begin(Step(step), SIZE)
            slot.payload[:] = content(rank, step)
            writer.commit(slot, digest(content(rank, step)))

    @staticmethod
    def writer(rank: Rank) -> Writer:
        return Writer(rank=rank, world_size=WORLD, generation=GENERATION, backups=True)

    def held(self) -> list[list[int]]:
        """Steps in the memory of each rank."""
        return [[c.step for c in slots.inventory(self.here.shm, [rank])] for rank in self.ranks]

    def pins(self) -> Pins:
        first, second = (pins_of(self.here.shm, rank) for rank in self.ranks)
        assert first == second
        return first

    def peer(self, rank: Rank) -> Peer:
        """This machine as the one that keeps the rank's backup."""
        setup = self.here.setup
        return Peer(rank=rank, machine=setup.machine, address=setup.address, port=self.shards.port)

    def order(self, step: int, to: Host, safe: int = NO_STEP, spread_s: float = 0.0) -> BackUpStep:
        return BackUpStep(
            id=f"b{step}",
            cause="test",
            why="test",
            machine=self.here.setup.machine,
            generation=GENERATION,
            step=Step(step),
            safe=Step(safe),
            peers=tuple(to.peer(rank) for rank in self.ranks),
            spread_s=spread_s,
        )

    def back_up(self, step: int, to: Host, safe: int = NO_STEP) -> StepBackedUp | BackupFailed:
        return asyncio.run(self.shards.back_up(self.order(step, to, safe)))

    def restore_order(self, step: int, source: Host) -> StartRanks:
        return StartRanks(
            id=f"s{step}",
            cause="test",
            why="test",
            machine=self.here.setup.machine,
            generation=Generation(2),
            node_rank=self.node_rank,
            master_addr="127.0.0.1",
            master_port=1,
            restore=Step(step),
            restore_generation=GENERATION,
            fetch=tuple(source.peer(rank) for rank in self.ranks),
            restarts=1,
        )

    def make_ready(self, order: StartRanks, within_s: float = 30.0) -> None:
        asyncio.run(self.shards.make_ready(order, self.ranks, within_s))


class Hosts:
    """Machines of one test."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._all: list[Host] = []

    def host(self, name: str, node_rank: int, interface: str = "") -> Host:
        self._all.append(Host(self._root, name, node_rank, interface))
        return self._all[-1]

    def end(self) -> None:
        for host in self._all:
            host.shards.close()
            shutil.rmtree(host.here.shm, ignore_errors=True)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(client, "RETRY_AFTER_S", (0.01,))
    made = Hosts(tmp_path)
    yield made
    made.end()


@pytest.fixture
def pair(hosts: Hosts) -> tuple[Host, Host]:
    """Two machines that keep each other's backups."""
    return hosts.host("m0", 0), hosts.host("m1", 1)


def copies(step: int, *ranks: int) -> tuple[Copy, ...]:
    return tuple(Copy(rank=Rank(rank), step=Step(step), generation=GENERATION) for rank in ranks)


def test_all_shards_of_a_machine_get_to_its_peers(pair: tuple[Host, Host]) -> None:
    m0, m1 = pair
    m0.save(10)
    answer = m0.back_up(10, to=m1)
    assert isinstance(answer, StepBackedUp)
    assert (answer.action, answer.step, answer.sent_bytes) == ("b10", 10, 2 * SIZE)
    assert answer.took_s > 0
    assert m1.shards.backups() == copies(10, 0, 1)
    assert m0.shards.backups() == ()


def test_a_step_that_is_still_to_come_is_waited_for_and_kept(pair: tuple[Host, Host]) -> None:
    """Ordered ahead of time, and then the ranks run on, one faster than the other."""
    m0, m1 = pair

    async def order_then_save() -> StepBackedUp | BackupFailed:
        answer = asyncio.create_task(m0.shards.back_up(m0.order(10, to=m1, safe=3)))
        await asyncio.sleep(0)
        for step in range(8, 20):
            m0.save(step, m0.ranks[:1])
        await asyncio.sleep(0.05)
        assert not answer.done()
        for step in range(8, 20):
            m0.save(step, m0.ranks[1:])
        return await answer

    m0.save(3)
    assert isinstance(asyncio.run(order_then_save()), StepBackedUp)
    assert m0.held() == [[3, 10, 17, 18, 19]] * 2
    assert m0.pins() == Pins(backup=Step(10), safe=Step(3))


def test_the_next_order_releases_the_former_safe_step_and_keeps_the_new_one(
    pair: tuple[Host, Host],
) -> None:
    m0, m1 = pair
    m0.save(10)
    m0.back_up(10, to=m1)
    m0.save(20)
    m0.back_up(20, to=m1, safe=10)
    m0.save(30)
    m0.back_up(30, to=m1, safe=20)
    for step in range(31, 40):
        m0.save(step)
    assert m0.held() == [[20, 30, 37, 38, 39]] * 2
    assert m1.shards.backups() == tuple(
        Copy(rank=rank, step=Step(step), generation=GENERATION)
        for rank in m0.ranks
        for step in (20, 30)
    )


def test_without_its_peer_a_backup_fails_and_only_the_safe_step_stays_kept(
    pair: tuple[Host, Host],
) -> None:
    m0, m1 = pair
    m0.save(10)
    m0.save(20)
    port = m1.shards.port
    m1.shards.close()
    failed = m0.back_up(20, to=m1, safe=10)
    assert isinstance(failed, BackupFailed)
    assert failed.reason.startswith(f"m1 at 127.0.0.1:{port}: no connection: ")
    assert m0.pins() == Pins(backup=None, safe=Step(10))


def test_ranks_that_ended_before_they_saved_the_step_are_named(pair: tuple[Host, Host]) -> None:
    m0, m1 = pair
    m0.save(10, m0.ranks[:1])
    m0.running = False
    failed = m0.back_up(10, to=m1)
    assert isinstance(failed, BackupFailed)
    assert failed.reason == "rank 1 ended before it saved step 10"
    assert m1.shards.backups() == ()


def test_what_was_damaged_before_it_was_sent_keeps_the_digest_that_tells(
    pair: tuple[Host, Host], hosts: Hosts
) -> None:
    m0, m1 = pair
    m0.save(10)
    flip_bit(m0.here.shm, Rank(1))
    assert isinstance(m0.back_up(10, to=m1), StepBackedUp)
    newcomer = hosts.host("m2", 0)
    newcomer.make_ready(newcomer.restore_order(10, source=m1))
    for rank in newcomer.ranks:
        expected = Expected(step=Step(10), rank=rank, generation=GENERATION, world_size=WORLD)
        shard = slots.find(newcomer.here.shm, expected)
        same = shard.header.digest == digest(bytes(shard.payload))
        assert same == (rank != 1)


def test_a_newer_order_replaces_one_that_waits(pair: tuple[Host, Host]) -> None:
    m0, m1 = pair

    async def replace() -> StepBackedUp | BackupFailed:
        first = asyncio.create_task(m0.shards.back_up(m0.order(50, to=m1, safe=10)))
        await asyncio.sleep(0.05)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        return await m0.shards.back_up(m0.order(20, to=m1, safe=10))

    m0.save(10)
    m0.save(20)
    assert isinstance(asyncio.run(replace()), StepBackedUp)
    assert m0.pins() == Pins(backup=Step(20), safe=Step(10))


def test_a_backup_yields_to_ranks_that_communicate_but_not_for_ever(
    pair: tuple[Host, Host],
) -> None:
    m0, m1 = pair
    m0.save(10)
    m0.communicating = True
    answer = asyncio.run(m0.shards.back_up(m0.order(10, to=m1, spread_s=0.1)))
    assert isinstance(answer, StepBackedUp)
    assert answer.took_s >= 0.1
    m0.save(20)
    hurried = m0.back_up(20, to=m1)
    assert isinstance(hurried, StepBackedUp)


def test_a_backup_is_not_waited_for_beyond_its_time(
    pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing_up, "SENT_WITHIN_S", 0.05)
    m0, m1 = pair
    m0.save(10)
    monkeypatch.setattr(backing_up, "rate_for", lambda *_: 1.0)
    failed = m0.back_up(10, to=m1)
    assert isinstance(failed, BackupFailed)
    assert failed.reason == "the peers did not take step 10 within 0.05 s"


def test_the_network_that_backups_take_is_told_once(
    pair: tuple[Host, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    m0, m1 = pair
    for step in (10, 20):
        m0.save(step)
        m0.back_up(step, to=m1)
    told = capsys.readouterr().out
    assert told.count("each backup sends 9.77 KiB from this machine") == 1
    assert "one every 10 steps of 0.250 s takes 3.91 KiB/s" in told


# --- restores -------------------------------------------------------------------------------------


def test_a_newcomer_gets_all_shards_of_the_lost_machine_into_its_slots(
    pair: tuple[Host, Host], hosts: Hosts
) -> None:
    m0, m1 = pair
    m0.save(10)
    m0.back_up(10, to=m1)
    newcomer = hosts.host("m2", 0)
    newcomer.make_ready(newcomer.restore_order(10, source=m1))
    assert newcomer.held() == [[10], [10]]
    for rank in newcomer.ranks:
        expected = Expected(step=Step(10), rank=rank, generation=GENERATION, world_size=WORLD)
        shard = slots.find(newcomer.here.shm, expected)
        shard.verify()
        assert shard.crc is not None
        assert shard.header.digest == digest(content(rank, 10))
        assert bytes(shard.payload) == content(rank, 10)
    for step in range(11, 20):
        newcomer.save(step)
    assert newcomer.held() == [[10, 16, 17, 18, 19]] * 2, "the only copy beside the peer's is kept"


def test_ranks_of_another_size_get_the_shards_of_ranks_that_were_alike(
    pair: tuple[Host, Host], hosts: Hosts
) -> None:
    """Straight from the slots of ranks that run elsewhere, and from a backup that lies here."""
    m0, m1 = pair
    m0.save(10)
    m1.save(10)
    m1.save(11)
    m0.back_up(10, to=m1)
    order = replace(
        m1.restore_order(10, source=m1),
        nnodes=1,
        dp=2,
        restore_nnodes=2,
        restores=((Rank(0), Rank(0)), (Rank(1), Rank(3))),
        fetch=(m1.peer(Rank(0)),),
    )
    slots.make_way(m1.here.shm, [Rank(0), Rank(1)], Step(10))
    m1.make_ready(order)
    there = slots.inventory(m1.here.shm, slots.ranks_in(m1.here.shm))
    assert there == list(copies(10, 0, 2, 3)), "what it had, and the backup among it"
    for rank in (0, 3):
        expected = Expected(step=Step(10), rank=Rank(rank), generation=GENERATION, world_size=WORLD)
        assert bytes(slots.find(m1.here.shm, expected).payload) == content(rank, 10)
    newcomer = hosts.host("m2", 0)
    newcomer.make_ready(
        replace(
            order,
            nnodes=3,
            restores=((Rank(4), Rank(2)), (Rank(5), Rank(3))),
            fetch=(m1.peer(Rank(2)), m1.peer(Rank(3))),
        )
    )
    held = slots.inventory(newcomer.here.shm, slots.ranks_in(newcomer.here.shm))
    assert [copy for copy in held if copy.rank > 1] == list(copies(10, 2, 3))


def test_a_machine_that_lost_one_copy_fetches_it_beside_those_it_has(
    pair: tuple[Host, Host],
) -> None:
    m0, m1 = pair
    for step in (8, 9, 10):
        m0.save(step)
    m0.back_up(10, to=m1, safe=8)
    slots.drop_step(m0.here.shm, Rank(1), Step(10))
    order = m0.restore_order(10, source=m1)
    m0.make_ready(replace(order, fetch=order.fetch[1:]))
    assert m0.held() == [[8, 9, 10], [8, 9, 10]]
    assert m0.pins() == Pins(backup=Step(10), safe=Step(8))


def test_a_damaged_backup_fails_the_start_and_is_not_offered_again(
    pair: tuple[Host, Host], hosts: Hosts
) -> None:
    m0, m1 = pair
    m0.save(10)
    m0.back_up(10, to=m1)
    flip_bit(m1.here.shm / "backup", Rank(1))
    newcomer = hosts.host("m2", 0)
    with pytest.raises(
        NotFetched, match=r"step 10 could not be fetched: m1 at .*: its copy was da"
    ):
        newcomer.make_ready(newcomer.restore_order(10, source=m1))
    assert m1.shards.backups() == copies(10, 0)
    assert newcomer.held()[1] == []


def test_a_source_that_is_gone_fails_the_start_with_its_name(
    pair: tuple[Host, Host], hosts: Hosts
) -> None:
    _, m1 = pair
    newcomer = hosts.host("m2", 0)
    order = newcomer.restore_order(10, source=m1)
    m1.shards.close()
    with pytest.raises(NotFetched, match=r"step 10 could not be fetched: m1 at .*: no connection"):
        newcomer.make_ready(order)
    assert newcomer.held() == [[], []]


def test_a_step_that_is_also_on_disk_is_read_there_if_its_peer_is_gone(
    pair: tuple[Host, Host], hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    m0, m1 = pair
    directory = Path(m0.here.spec.checkpoint.directory)
    for host in pair:
        host.save(10)
        for rank in host.ranks:
            disk.persist(host.here.shm, rank, Step(10), directory)
    disk.publish(directory, Step(10), GENERATION, WORLD, keep=2)
    newcomer = hosts.host("m2", 0)
    order = newcomer.restore_order(10, source=m1)
    m1.shards.close()
    newcomer.make_ready(order)
    assert newcomer.held() == [[], []]
    assert "no connection" in capsys.readouterr().out
    with pytest.raises(NotFetched):
        newcomer.make_ready(replace(order, restore_generation=Generation(2)))


def test_a_restart_forgets_the_backups_of_the_future_that_it_abandons(
    pair: tuple[Host, Host],
) -> None:
    m0, m1 = pair
    for step, safe in ((10, NO_STEP), (20, 10)):
        m0.save(step)
        m0.back_up(step, to=m1, safe=safe)
    order = m1.restore_order(10, source=m0)
    m1.make_ready(replace(order, fetch=()))
    assert m1.shards.backups() == copies(10, 0, 1)


def test_the_next_agent_of_a_machine_offers_what_the_former_one_took_at_the_same_port(
    pair: tuple[Host, Host], hosts: Hosts
) -> None:
    m0, m1 = pair
    m0.save(10)
    m0.back_up(10, to=m1)
    port = m1.shards.port
    m1.shards.close()
    assert m1.agent(port).port == port
    assert m1.shards.backups() == copies(10, 0, 1)
    newcomer = hosts.host("m2", 0)
    newcomer.make_ready(newcomer.restore_order(10, source=m1))
    assert newcomer.held() == [[10], [10]]


def test_backups_go_over_the_interface_that_was_chosen(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hosts.host("m0", 0, interface="lo").shards.address == "127.0.0.1"
    assert capsys.readouterr().out == ""
    assert hosts.host("m1", 1, interface="none0").shards.address == "127.0.0.1"
    assert "no address of none0 here: backups go over 127.0.0.1" in capsys.readouterr().out


def test_once_fenced_a_machine_keeps_what_it_has_told_of(pair: tuple[Host, Host]) -> None:
    m0, m1 = pair
    for step, safe in ((10, NO_STEP), (20, 10)):
        m0.save(step)
        m0.back_up(step, to=m1, safe=safe)
    m1.shards.fence(Generation(2))
    told = m1.shards.backups()
    m0.save(30)
    failed = m0.back_up(30, to=m1, safe=10)
    assert isinstance(failed, BackupFailed)
    assert "generation 1 is over, it is at generation 2" in failed.reason
    assert m1.shards.backups() == told


def flip_bit(shm: Path, rank: Rank) -> None:
    """Damage the newest shard of this rank where it lies."""
    directory = rank_shm(shm, rank)
    found = slots.headers_in(directory)
    index = max(found, key=lambda number: found[number].step)
    with slots.slot_path(directory, index).open("r+b") as file:
        file.seek(PAGE + 100)
        byte = file.read(1)[0]
        file.seek(PAGE + 100)
        file.write(bytes([byte ^ 1]))
