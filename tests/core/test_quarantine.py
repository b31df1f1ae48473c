"""Evicted machines: who may be taken away, who is known again, what their memory is worth."""

from __future__ import annotations

from everstep.core.evicting import but, by_trust
from everstep.core.quarantine import taken_away
from everstep.core.restore import copies_of
from everstep.core.rules import assign
from everstep.core.state import Machine, State
from everstep.model import Copy, Generation, MachineId, NodeRank, Rank, Step
from tests.transcripts.transcript import Transcript

TRAINS = """
> 0 job nnodes=2 nproc=1 standbys=1 disk_every=0
> 1 join m0 m1 m2 shard_port=7000
> 2 stopped m0 m1
> 3 started m0 m1
> 4 progress 12
"""
EVICTED = (
    TRAINS
    + """
> 5 alert m1 check=DiskFault verdict=evict source=alertmanager
> 5.2 stopped m0 m1 copies=13,15 finished=15
"""
)
TESTED = (
    EVICTED
    + """
> 5.4 stopped m2
> 6 started m0 m2
"""
)
RETURNED = (
    TESTED
    + """
> 7 tested m1 passed=yes
> 8 progress 17
> 607 TimerFired
> 608 tested m1 passed=yes
"""
)
M1 = MachineId("m1")


def after(story: str) -> State:
    run = Transcript()
    run.run(story)
    return run.core.state


def test_a_machine_is_taken_away_when_nothing_is_to_be_learned_from_it() -> None:
    assert not taken_away(after(TRAINS), M1), "it is in the job"
    assert not taken_away(after(EVICTED), M1), "it gives what its ranks had saved"
    assert not taken_away(after(TESTED), M1), "it is tested"
    assert not taken_away(after(TESTED + "> 7 MachineSilent m1\n"), M1), "its agent comes back"
    failed = TESTED + "> 7 tested m1 passed=no\n"
    assert not taken_away(after(failed), M1), "it leaves in good order"
    assert taken_away(after(failed + "> 8 released m1\n"), M1)
    assert taken_away(after(failed + "> 8 MachineSilent m1\n"), M1), "or not"
    assert taken_away(after(TRAINS + "> 5 MachineLost m1 witness=gone\n"), M1)
    assert not taken_away(after(RETURNED), M1), "it is a standby"
    assert not taken_away(after(TRAINS), MachineId("stranger"))


def test_who_was_evicted_while_silent_is_taken_away_at_once() -> None:
    silent = TRAINS + (
        "> 5 MachineSilent m1\n> 6 RankExited m0 rank=0 signal=9\n> 6.1 stopped m0\n"
        "> 11.5 TimerFired\n"
    )
    state = after(silent)
    assert state.machines[M1].evicted
    assert taken_away(state, M1)


def test_a_new_controller_takes_away_only_who_is_not_looked_into() -> None:
    started = '> 9 ControllerStarted term=2 version="0"\n'
    assert not taken_away(after(TESTED + started), M1)
    assert taken_away(after(TESTED + "> 7 tested m1 passed=no\n" + started), M1)


def test_agents_that_know_no_tests_go_as_before() -> None:
    old = EVICTED.replace("join m0 m1 m2", "join m0 m1 m2 old=1")
    run = Transcript()
    told = run.run(old + "> 5.4 stopped m2\n> 6 started m0 m2\n")
    assert "ReleaseMachine machine=m1" in told
    assert "TestMachine" not in told


def test_hosts_of_one_name_say_nothing_of_a_newcomer() -> None:
    """Several agents on one host, or many containers called localhost."""
    alike = TRAINS.replace("shard_port", "host=h shard_port")
    run = Transcript()
    told = run.run(
        alike + "> 5 MachineLost m1 witness=gone\n> 6 stopped m0 m2\n> 9 join m7 host=h\n"
    )
    assert not run.core.state.machines[MachineId("m7")].evicted
    assert "TestMachine" not in told


def test_names_of_stand_ins_are_all_that_is_known_of_them() -> None:
    local = TRAINS.replace("disk_every=0", "disk_every=0 local=1")
    state = after(local + "> 5 MachineLost m1 witness=gone\n> 9 join m7 host=host-m1\n")
    assert not state.machines[MachineId("m7")].evicted


def test_a_machine_that_returns_gets_its_former_position_if_it_is_free() -> None:
    state = after(RETURNED)
    assert state.machines[M1].was == 1
    machines: list[Machine] = state.standbys()
    free = [NodeRank(0), NodeRank(1)]
    assert assign(free, machines) == [(1, "m1")]
    assert assign([NodeRank(0)], machines) == [(0, "m1")]


def test_what_training_has_left_behind_is_restored_by_nobody() -> None:
    """Steps beyond the one that others went on from are another history's."""
    state = after(RETURNED)
    assert [(each.through, each.step) for each in state.left] == [(0, 0), (1, 16)]
    mine = [copy(13, 1), copy(15, 1), copy(16, 1), copy(17, 2)]
    machine = state.machines[M1]
    machine.backups = tuple(mine)
    kept = [kept for _, kept in copies_of(state).backups]
    assert kept == [copy(13, 1), copy(15, 1), copy(17, 2)]


def copy(step: int, generation: int) -> Copy:
    return Copy(rank=Rank(1), step=Step(step), generation=Generation(generation))


def test_as_long_as_nobody_went_on_without_it_its_memory_counts() -> None:
    """It may be the one that the job waits for."""
    alone = replace_standbys(TRAINS)
    waiting = alone + (
        "> 5 MachineSilent m1\n> 6 RankExited m0 rank=0 signal=9\n> 6.1 stopped m0 copies=15"
        " finished=15\n> 11.5 TimerFired\n> 12 join m1 generation=1 shard_port=7000\n"
        "> 13 stopped m1 finished=15\n> 14 tested m1 passed=yes\n> 614 TimerFired\n"
    )
    run = Transcript()
    told = run.run(waiting)
    assert "WakeStandby machine=m1" not in told.split("MachineSilent")[1]
    machine = run.core.state.machines[M1]
    machine.copies = (copy(15, 1),)
    told = run.run("> 615 tested m1 passed=yes\n")
    assert "ReturnMachine machine=m1" in told
    assert "WakeStandby machine=m1 node_rank=1" in told
    assert "restore=15 restore_generation=1" in told
    assert "2 in memory" in told


def replace_standbys(story: str) -> str:
    return story.replace("standbys=1", "standbys=0").replace("join m0 m1 m2", "join m0 m1")


def test_who_was_accused_and_acquitted_is_woken_last_and_it_is_said() -> None:
    run = Transcript()
    run.run(RETURNED + "> 609 join m3 shard_port=7000\n")
    assert "evicted before" in but(run.core.state, M1, 610.0)
    run.run("> 700 MachineLost m2 witness=gone\n")
    assert run.core.state.positions[NodeRank(1)] == "m3", "it had that position before, and is not"
    record = run.core.state.evictions[0]
    assert record.guilty is False
    assert "the last: 48 checks found nothing" in record.verdict


def test_who_was_only_silent_is_woken_before_who_is_accused_and_acquitted() -> None:
    run = Transcript()
    run.run(RETURNED)
    state = run.core.state
    state.evictions[0].accused = False
    assert M1 in [machine.machine for machine in by_trust(state, state.standbys(), 610.0)[1]]


def test_who_waits_for_its_next_test_is_still_released_when_its_ranks_are_left_behind() -> None:
    run = Transcript()
    run.run(TESTED + "> 7 tested m1 passed=yes\n> 8 progress 17\n")
    run.core.state.machines[M1].lost = "its owner says so"
    told = "\n".join(run.run("> 9 TimerFired\n").splitlines())
    assert "ReleaseMachine machine=m1" in told
