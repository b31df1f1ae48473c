"""Stand-in machines: real keepers, real signals, small scripts in place of agent and launcher."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from everstep.cluster.base import Journalled, RequestRefused
from everstep.cluster.local import IN_VAIN_MAX, LocalCluster
from everstep.events import MachineLost
from everstep.model import JobSpec, MachineId
from everstep.paths import JobPaths, MachineSetup, shm_dir
from everstep.processes import alive
from tests.cluster.support import DEADLINE_S, child_of, job, keeper_of, kill, runs, sleeping

M0, M1, M2 = MachineId("m0"), MachineId("m1"), MachineId("m2")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[JobSpec, JobPaths]]:
    with job(tmp_path, nnodes=1, standbys=1) as made:
        yield made


class Watcher:
    """The controller's side: takes what the cluster reports."""

    def __init__(self) -> None:
        self.lost: list[MachineLost] = []

    def take(self, fact: Journalled) -> None:
        assert isinstance(fact.event, MachineLost)
        self.lost.append(fact.event)
        if fact.then is not None:
            fact.then()


def gone(paths: JobPaths, machine: MachineId) -> Path:
    return paths.machine(machine).root / "gone"


async def until(what: str, holds: Callable[[], object]) -> None:
    """Poll a condition; fail when it does not come true."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


async def started(spec: JobSpec, paths: JobPaths, watcher: Watcher) -> LocalCluster:
    """A cluster whose stand-ins run and have shared memory."""
    cluster = LocalCluster(spec, paths, sleeping)
    cluster.watch(watcher.take)
    cluster.first().send()
    for machine in (M0, M1):
        await until(f"{machine} runs", partial(runs, spec, paths, machine))
    return cluster


def test_a_job_gets_its_machines_and_standbys_each_with_an_address_and_a_name_of_its_own(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    asyncio.run(started(spec, paths, Watcher()))
    setups = [
        msgspec.json.decode(paths.machine(m).setup.read_bytes(), type=MachineSetup)
        for m in (M0, M1)
    ]
    assert [setup.machine for setup in setups] == [M0, M1]
    assert [setup.address for setup in setups] == ["127.0.0.10", "127.0.0.11"]
    assert all(setup.env["GLOO_SOCKET_IFNAME"] == "lo" for setup in setups)
    assert shm_dir(spec.job, spec.uid, M0) != shm_dir(spec.job, spec.uid, M1)


def test_a_request_shows_what_it_will_start_and_starts_nothing_before_it_is_sent(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two

    async def scenario() -> None:
        request = LocalCluster(spec, paths, sleeping).first()
        assert "stand-in machine m0 at 127.0.0.10: " in str(request)
        assert "stand-in machine m1 at 127.0.0.11: " in str(request)
        assert not paths.machines.exists()

    asyncio.run(scenario())


def test_the_death_of_a_keeper_is_told_at_once_and_its_machine_is_swept(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two

    async def scenario() -> None:
        watcher = Watcher()
        await started(spec, paths, watcher)
        keeper, child = keeper_of(paths, M0), child_of(spec, M0)
        assert keeper is not None
        assert child is not None
        kill(keeper)
        await until("the loss is told", lambda: watcher.lost)
        lost = MachineLost(machine=M0, witness=f"its keeper, pid {keeper.pid}, is gone")
        assert watcher.lost == [lost]
        await until("it is swept", gone(paths, M0).exists)
        assert not alive(child)
        assert not shm_dir(spec.job, spec.uid, M0).exists()
        assert child_of(spec, M1) is not None, "the other machine is left alone"

    asyncio.run(scenario())


def test_an_evicted_machine_is_ended_without_being_called_lost(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two

    async def scenario() -> None:
        watcher = Watcher()
        cluster = await started(spec, paths, watcher)
        cluster.release(M0)
        cluster.release(M0)
        await until("it is gone", gone(paths, M0).exists)
        assert keeper_of(paths, M0) is None
        assert not shm_dir(spec.job, spec.uid, M0).exists()
        assert watcher.lost == []

    asyncio.run(scenario())


def test_a_restarted_controller_finds_its_machines_and_starts_no_second_one(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    asyncio.run(started(spec, paths, Watcher()))
    keepers = [keeper_of(paths, m) for m in (M0, M1)]

    async def next_controller() -> None:
        watcher = Watcher()
        cluster = LocalCluster(spec, paths, sleeping)
        cluster.watch(watcher.take)
        assert str(cluster.first()) == "no stand-in machine to start"
        assert [keeper_of(paths, m) for m in (M0, M1)] == keepers
        kill(keepers[1])
        await until("it watches what it did not start", lambda: watcher.lost)
        assert watcher.lost[0].machine == M1

    asyncio.run(next_controller())


def test_a_machine_that_died_while_there_was_no_controller_is_told_by_the_next_one_and_once(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    asyncio.run(started(spec, paths, Watcher()))
    kill(keeper_of(paths, M0))

    async def next_controller() -> list[MachineLost]:
        watcher = Watcher()
        LocalCluster(spec, paths, sleeping).watch(watcher.take)
        if watcher.lost:
            await until("swept", gone(paths, M0).exists)
        return watcher.lost

    told = asyncio.run(next_controller())
    assert [lost.machine for lost in told] == [M0]
    assert told[0].witness == "its keeper was gone when the controller came back"
    assert asyncio.run(next_controller()) == []


def test_a_loss_that_never_got_into_the_journal_is_told_again(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    asyncio.run(started(spec, paths, Watcher()))
    kill(keeper_of(paths, M0))

    async def controller(*, journals: bool) -> list[MachineLost]:
        lost: list[MachineLost] = []

        def take(fact: Journalled) -> None:
            assert isinstance(fact.event, MachineLost)
            lost.append(fact.event)
            if journals and fact.then is not None:
                fact.then()

        LocalCluster(spec, paths, sleeping).watch(take)
        return lost

    assert len(asyncio.run(controller(journals=False))) == 1
    assert len(asyncio.run(controller(journals=True))) == 1


def test_a_keeper_without_a_pid_file_yet_is_found_by_its_command_line(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    asyncio.run(started(spec, paths, Watcher()))
    paths.machine(M0).pid_file("keeper").unlink()

    async def next_controller() -> None:
        watcher = Watcher()
        LocalCluster(spec, paths, sleeping).watch(watcher.take)
        assert watcher.lost == []

    asyncio.run(next_controller())


def test_a_repeated_request_starts_nothing_twice_and_names_are_never_used_again(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two

    async def scenario() -> None:
        watcher = Watcher()
        cluster = await started(spec, paths, watcher)
        cluster.release(M1)
        await until("it is gone", gone(paths, M1).exists)
        cluster.request(1, "17.2").send()
        await until("m2 runs", lambda: keeper_of(paths, M2))
        repeated = cluster.request(1, "17.2")
        assert str(repeated) == "no stand-in machine to start"
        assert str(cluster.request(1, "30.0")).startswith("stand-in machine m3 at 127.0.0.13: ")

    asyncio.run(scenario())


def test_a_machine_whose_keeper_was_never_started_is_started_by_the_next_controller(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    asyncio.run(started(spec, paths, Watcher()))
    killed_before_the_start = paths.machine(M2).root
    killed_before_the_start.mkdir()
    (killed_before_the_start / "request").write_text("17.2")

    async def next_controller() -> None:
        cluster = LocalCluster(spec, paths, sleeping)
        cluster.watch(Watcher().take)
        cluster.request(1, "17.2").send()
        await until("m2 runs", lambda: keeper_of(paths, M2))

    asyncio.run(next_controller())


def test_the_end_of_the_job_ends_what_did_not_end_by_itself(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two

    async def scenario() -> None:
        watcher = Watcher()
        cluster = await started(spec, paths, watcher)
        await cluster.close(0.05)
        assert keeper_of(paths, M0) is None
        assert keeper_of(paths, M1) is None
        assert not shm_dir(spec.job, spec.uid, M0).exists()
        assert watcher.lost == []

    asyncio.run(scenario())


def test_the_machines_of_a_job_whose_directory_was_deleted_can_still_be_ended(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two
    kept = paths.spec.read_bytes()

    async def scenario() -> None:
        cluster = await started(spec, paths, Watcher())
        children = [child_of(spec, machine) for machine in (M0, M1)]
        shutil.rmtree(paths.root)
        await cluster.close(0.0)
        assert not any(child and alive(child) for child in children)
        assert not shm_dir(spec.job, spec.uid, M0).exists()
        assert not paths.root.exists()

    asyncio.run(scenario())
    paths.root.mkdir()
    paths.spec.write_bytes(kept)


def test_machines_that_die_at_birth_again_and_again_are_not_replaced_for_ever(
    two: tuple[JobSpec, JobPaths],
) -> None:
    spec, paths = two

    async def scenario() -> None:
        watcher = Watcher()
        cluster = await started(spec, paths, watcher)
        for machine in (M0, M1):
            kill(keeper_of(paths, machine))
        for number in range(IN_VAIN_MAX - 2):
            cluster.request(1, f"{number}.0").send()
            machine = MachineId(f"m{number + 2}")
            await until("it runs", partial(runs, spec, paths, machine))
            kill(keeper_of(paths, machine))
        await until("all losses are told", lambda: len(watcher.lost) == IN_VAIN_MAX)
        refused = cluster.request(1, "99.0")
        assert "no request can be made: the last 5 stand-ins ended within 5 s" in str(refused)
        with pytest.raises(RequestRefused, match=r"see keeper\.log"):
            refused.send()

    asyncio.run(scenario())
