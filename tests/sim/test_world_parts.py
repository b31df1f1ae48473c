"""The parts of the simulated world do what the real ones do."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.actions import StartRanks, StopRanks
from everstep.core.agent_io import OrderReceived
from everstep.events import TimerFired
from everstep.journal.records import Fenced
from everstep.model import Copy, Generation, MachineId, NodeRank, Rank, Step, Term
from everstep.sim.agent import FORKING_S, SETTLED_S
from everstep.sim.disk import Disk
from everstep.sim.ground import Ground
from everstep.sim.machine import Machine
from everstep.sim.memory import RankMemory
from everstep.sim.options import draw
from everstep.sim.records import Ledger, MemoryJournal
from everstep.sim.schedule import Schedule

G1, G2 = Generation(1), Generation(2)


def steps(memory: RankMemory) -> list[int]:
    return [copy.step for copy in memory.copies()]


def saved(*numbers: int, pin: int | None = None) -> RankMemory:
    """A rank that saved these steps, one a second, each save taking half of it."""
    memory = RankMemory(Rank(0))
    memory.pin(None if pin is None else Step(pin))
    for number in numbers:
        memory.plan_save(Step(number), G1, float(number), number + 0.5)
    return memory


# --- slots ---------------------------------------------------------------------------------------


def test_three_slots_rotate_and_the_one_being_written_is_torn() -> None:
    memory = saved(*range(6))
    memory.settle(3.7)
    assert steps(memory) == [1, 2, 3]
    memory.settle(4.2)
    assert steps(memory) == [2, 3]
    memory.settle(4.5)
    assert steps(memory) == [2, 3, 4]


def test_a_pinned_step_is_not_overwritten_and_takes_a_fourth_slot() -> None:
    memory = saved(*range(9), pin=2)
    memory.settle(8.9)
    assert steps(memory) == [2, 6, 7, 8]
    memory.pin(None)
    memory.plan_save(Step(9), G1, 9.0, 9.5)
    memory.plan_save(Step(10), G1, 10.0, 10.5)
    memory.settle(11.0)
    assert 2 not in steps(memory)


def test_a_killed_rank_leaves_what_it_had_committed() -> None:
    memory = saved(*range(6))
    memory.cut(4.2)
    memory.settle(100.0)
    assert steps(memory) == [2, 3]


def test_the_next_generation_drops_what_is_newer_and_overwrites_the_torn_slot_first() -> None:
    memory = saved(*range(5))
    memory.cut(4.7)
    memory.drop_newer(Step(3))
    assert steps(memory) == [2, 3]
    memory.plan_save(Step(4), G2, 9.0, 9.5)
    memory.settle(9.5)
    assert memory.copies() == [
        Copy(rank=Rank(0), step=Step(2), generation=G1),
        Copy(rank=Rank(0), step=Step(3), generation=G1),
        Copy(rank=Rank(0), step=Step(4), generation=G2),
    ]


# --- disk ----------------------------------------------------------------------------------------


def test_a_step_is_published_only_whole_and_of_one_generation() -> None:
    disk = Disk(world_size=2, keep=2)
    disk.persist(Rank(0), Step(5), G1)
    assert "rank 1 of step 5 is missing" in disk.publish(Step(5), G1)
    disk.persist(Rank(1), Step(5), G2)
    assert "or another one" in disk.publish(Step(5), G1)
    disk.persist(Rank(1), Step(5), G1)
    assert disk.publish(Step(5), G1) == ""
    assert [entry.step for entry in disk.published()] == [5]


def test_a_step_that_is_computed_anew_is_withdrawn_first() -> None:
    disk = Disk(world_size=1, keep=2)
    disk.persist(Rank(0), Step(5), G1)
    disk.publish(Step(5), G1)
    disk.persist(Rank(0), Step(5), G2)
    assert disk.published() == []


def test_older_steps_are_removed_and_a_full_disk_says_so() -> None:
    disk = Disk(world_size=1, keep=2)
    for number in (5, 10, 15):
        disk.persist(Rank(0), Step(number), G1)
        disk.publish(Step(number), G1)
    assert [entry.step for entry in disk.published()] == [10, 15]
    disk.full = True
    assert disk.persist(Rank(0), Step(20), G1) == "No space left on device"


# --- time and journal ----------------------------------------------------------------------------


def test_calls_are_made_in_order_of_time_and_then_of_planning() -> None:
    schedule, made = Schedule(0.0), []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (-5.0, "first")):
        schedule.at(time, lambda name=name: made.append(name))  # type: ignore[misc]
    assert not schedule.run(lambda: False, deadline=1.5)
    assert (made, schedule.now) == (["first", "a", "b"], 1.0)
    assert schedule.run(lambda: "c" in made, deadline=3.0)


def test_a_rival_fences_the_journal_and_a_power_failure_takes_what_was_not_synced() -> None:
    ledger = Ledger()
    first = MemoryJournal(ledger, 1000)
    first.append(TimerFired(), 1.0, origin=None, actions=[])
    first.sync()
    first.append(TimerFired(), 2.0, origin=None, actions=[])
    assert ledger.lose_unsynced() == 1
    assert [record.time for record in ledger.records] == [1.0]
    MemoryJournal(ledger, 1000)
    with pytest.raises(Fenced):
        first.append(TimerFired(), 3.0, origin=None, actions=[])


def test_options_are_the_seeds_alone() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


# --- machines ------------------------------------------------------------------------------------


def let(ground: Ground, for_s: float) -> None:
    """Let so much time pass."""
    ground.schedule.run(lambda: False, ground.schedule.now + for_s)


def test_a_fork_under_way_does_not_outlive_the_boot_of_its_machine() -> None:
    ground = Ground(draw(0), lambda _: None)
    machine = Machine(MachineId("m0"), ground, "host-m0")
    let(ground, 20.0)
    assert machine.launcher_up
    assert machine.agent is not None
    common: dict[str, Any] = {
        "cause": "1",
        "why": "test",
        "machine": machine.name,
        "generation": G1,
    }
    start = StartRanks(
        id="start",
        node_rank=NodeRank(0),
        master_addr="a",
        master_port=1,
        restore=Step(-1),
        restore_generation=Generation(0),
        restarts=0,
        **common,
    )
    machine.agent._tell(OrderReceived(term=Term(1), order=StopRanks(id="stop", **common)))
    let(ground, 5 * SETTLED_S)
    machine.agent._tell(OrderReceived(term=Term(1), order=start))
    let(ground, FORKING_S / 2)
    machine.reboot()
    let(ground, 20.0)
    assert machine.running() == []
    assert ground.gangs == {}
