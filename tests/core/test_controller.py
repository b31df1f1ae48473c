"""What the transcripts do not tell: odd facts, replays, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.actions import (
    BackUpStep,
    BeginGeneration,
    FinishJob,
    OpenIncident,
    Outcome,
    PageHuman,
    PersistStep,
    RequestMachines,
    StartRanks,
)
from everstep.controller.views import status
from everstep.core.controller import ControllerCore
from everstep.core.copied import BACKUP_RETRY_S
from everstep.core.faults import objection, target_of
from everstep.core.rules import assign
from everstep.core.state import Machine
from everstep.events import (
    BackupFailed,
    FaultRequested,
    MachineJoined,
    MachineLost,
    MachinesRequested,
    PersistFailed,
    RankExited,
    RanksStopped,
    StartFailed,
    StopRequested,
    TimerFired,
)
from everstep.model import (
    ExitStatus,
    Fault,
    Generation,
    MachineId,
    NodeRank,
    Rank,
    RankStatus,
    Step,
)
from tests.transcripts.transcript import Transcript

RUNNING = """
> 0 job nnodes=2 nproc=2 standbys=1 disk_every=10
> 1 join m0 m1 m2
> 2 stopped m0 m1
> 3 started m0 m1
"""


def running(more: str = "") -> ControllerCore:
    transcript = Transcript()
    transcript.run(RUNNING + more)
    return transcript.core


def test_facts_before_the_job_change_nothing() -> None:
    core = ControllerCore()
    assert core.handle(TimerFired(), 1.0) == []
    assert core.handle(StopRequested(by="me"), 2.0) == []
    assert core.next_deadline() is None


def test_time_never_goes_back() -> None:
    core = running()
    with pytest.raises(AssertionError, match="time went back"):
        core.handle(TimerFired(), 2.0)


def test_a_machine_lost_before_it_joined_is_asked_for_again_and_once() -> None:
    transcript = Transcript()
    transcript.run("> 0 job nnodes=2 nproc=1 standbys=0 disk_every=0\n> 1 join m0\n")
    lost = MachineLost(machine=MachineId("m1"), witness="its keeper is gone")
    (request,) = transcript.core.handle(lost, 2.0)
    assert isinstance(request, RequestMachines)
    assert request.count == 1
    assert transcript.core.handle(lost, 3.0) == []


def test_facts_about_strangers_and_old_generations_change_nothing_but_the_count() -> None:
    core = running()
    before = core.state.seq
    strange = MachineId("m9")
    for event in (
        MachineLost(machine=strange, witness="w"),
        RanksStopped(machine=strange, action="x", generation=Generation(1), store_port=1),
        RankExited(
            machine=strange, generation=Generation(0), rank=Rank(0), exit=ExitStatus(code=1)
        ),
        PersistFailed(machine=strange, action="x", step=Step(1), reason="r"),
        MachinesRequested(action="x"),
    ):
        assert core.handle(event, 4.0) == []
    assert core.state.seq == before + 5
    assert not core.state.failures


def test_a_machine_that_came_back_without_its_ranks_breaks_the_generation() -> None:
    core = running()
    joined = MachineJoined(
        machine=MachineId("m1"),
        agent="another",
        address="a",
        host="h",
        version="0",
        generation=Generation(0),
    )
    actions = core.handle(joined, 5.0)
    opened = next(a for a in actions if isinstance(a, OpenIncident))
    assert opened.symptom == "m1 came back without rank 2"


def test_an_exit_that_was_missed_is_learnt_from_the_next_hello() -> None:
    core = running()
    joined = MachineJoined(
        machine=MachineId("m1"),
        agent="another",
        address="a",
        host="h",
        version="0",
        generation=Generation(1),
        ranks=(
            RankStatus(rank=Rank(2), generation=Generation(1), pid=1),
            RankStatus(rank=Rank(3), generation=Generation(1), pid=2, exit=ExitStatus(signal=9)),
        ),
    )
    actions = core.handle(joined, 5.0)
    opened = next(a for a in actions if isinstance(a, OpenIncident))
    assert opened.symptom == "rank 3 on m1 ended with signal 9"


def test_ranks_that_ended_before_their_start_was_answered_are_not_waited_for() -> None:
    """The agent died with its answer, and its ranks died before the next agent came."""
    core = running("> 4 RankExited m1 rank=3 signal=9\n> 5 stopped m0 m1\n> 6 started m0\n")
    generation = core.state.generation
    joined = MachineJoined(
        machine=MachineId("m1"),
        agent="another",
        address="a",
        host="h",
        version="0",
        generation=generation,
        ranks=tuple(
            RankStatus(rank=Rank(r), generation=generation, pid=r, exit=ExitStatus(signal=9))
            for r in (2, 3)
        ),
    )
    actions = core.handle(joined, 7.0)
    assert any(isinstance(a, BeginGeneration) for a in actions)


def test_a_failed_disk_copy_is_tried_again_after_a_while_with_another_step() -> None:
    transcript = Transcript()
    transcript.run(RUNNING + "> 4 progress 0\n")
    core = transcript.core
    order = transcript.order(PersistStep, MachineId("m0"))
    failed = PersistFailed(
        machine=MachineId("m0"), action=order.id, step=order.step, reason="disk full"
    )
    assert core.handle(failed, 5.0) == []
    transcript.run("> 6 persisted m1\n> 7 progress 12\n")
    assert not [a for a in core.outstanding(MachineId("m0")) if isinstance(a, PersistStep)]
    (note,) = status(core.state, 8.0).notes
    assert note == "the newest copy to disk failed and is tried again: m0: disk full"
    transcript.run("> 36 progress 40\n")
    assert transcript.order(PersistStep, MachineId("m0")).step == 45
    transcript.run("> 37 progress 46\n> 38 persisted m0 m1\n> 39 published\n")
    assert status(core.state, 40.0).notes == ()


def test_a_machine_that_cannot_start_its_ranks_is_tried_again() -> None:
    transcript = Transcript()
    transcript.run("> 0 job nnodes=1 nproc=1\n> 1 join m0\n> 2 stopped m0\n")
    core = transcript.core
    order = core.outstanding(MachineId("m0"))[0]
    failed = StartFailed(
        machine=MachineId("m0"), action=order.id, generation=Generation(1), reason="no launcher"
    )
    core.handle(failed, 3.0)
    assert core.state.generation == 2
    assert core.state.incidents[0].symptom == "m0 could not start its ranks: no launcher"


def test_others_are_told_of_an_early_exit_and_nobody_is_stopped() -> None:
    core = running("> 4 RankExited m0 rank=0 code=0\n")
    deadline = core.next_deadline()
    assert deadline == 64.0
    actions = core.handle(TimerFired(), deadline)
    assert [type(action) for action in actions] == [PageHuman]
    assert core.state.phase == "running"
    assert core.next_deadline() is None


def test_a_recovery_without_steps_is_proven_by_time() -> None:
    core = running("> 4 RankExited m0 rank=0 signal=9\n> 5 stopped m0 m1\n> 6 started m0 m1\n")
    assert core.next_deadline() == 66.0
    core.handle(TimerFired(), 66.0)
    assert core.state.incident is None


def test_a_refused_request_is_not_repeated_for_ever() -> None:
    core = running("> 4 MachineLost m2 witness=gone\n")
    asked = [a for a in core.outstanding(None) if isinstance(a, RequestMachines)]
    assert [action.count for action in asked] == [1]
    refused = MachinesRequested(action=asked[0].id, reason="nobody owns machines here")
    assert core.handle(refused, 5.0) == []
    assert core.outstanding(None) == []


def test_an_evicted_machine_that_speaks_is_released_once() -> None:
    core = running("> 4 MachineLost m2 witness=gone\n")
    joined = MachineJoined(
        machine=MachineId("m2"),
        agent="agent-m2",
        address="a",
        host="h",
        version="0",
        generation=Generation(0),
    )
    assert [type(a).__name__ for a in core.handle(joined, 5.0)] == ["ReleaseMachine"]
    assert core.handle(joined, 6.0) == []
    assert core.state.machines[MachineId("m2")].evicted == "gone"


def test_positions_go_to_those_who_asked_then_by_name() -> None:
    def machine(name: str, asked: int | None = None) -> Machine:
        return Machine(
            machine=MachineId(name),
            agent="a",
            address="a",
            host="h",
            asked=None if asked is None else NodeRank(asked),
        )

    free = [NodeRank(0), NodeRank(1), NodeRank(2)]
    machines = [machine("m10"), machine("m9"), machine("m1", asked=2), machine("m2", asked=2)]
    assert assign(free, machines) == [(0, "m2"), (1, "m9"), (2, "m1")]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (FaultRequested(fault=Fault.KILL_CONTROLLER), (None, None)),
        (FaultRequested(fault=Fault.KILL_RANK), ("m1", 3)),
        (FaultRequested(fault=Fault.KILL_RANK, rank=Rank(0)), ("m0", 0)),
        (FaultRequested(fault=Fault.KILL_AGENT), ("m1", None)),
        (FaultRequested(fault=Fault.LOSE_MACHINE, machine=MachineId("m0")), ("m0", None)),
    ],
)
def test_faults_hit_what_was_named_else_the_last(
    request_: FaultRequested, expected: tuple[str | None, int | None]
) -> None:
    core = running()
    assert objection(core.state, request_) is None
    target = target_of(core.state, request_)
    assert (target.machine, target.rank) == expected


def test_faults_that_hit_nothing_are_refused_in_a_sentence() -> None:
    core = running()
    assert "ranks go from 0 to 3" in str(
        objection(core.state, FaultRequested(fault=Fault.KILL_RANK, rank=Rank(4)))
    )
    unknown = FaultRequested(fault=Fault.KILL_AGENT, machine=MachineId("x"))
    assert objection(core.state, unknown) == (
        "machine x is not in the job: its machines are m0, m1"
    )
    core = running("> 4 MachineSilent m1\n")
    silent = FaultRequested(fault=Fault.KILL_AGENT)
    assert "not connected" in str(objection(core.state, silent))
    core = running("> 4 StopRequested by=me\n")
    assert "not running" in str(objection(core.state, silent))


def test_a_replay_takes_the_recorded_decisions_and_says_where_it_differs() -> None:
    core, replayed = running(), running()
    exited = RankExited(
        machine=MachineId("m0"), generation=Generation(1), rank=Rank(0), exit=ExitStatus(signal=9)
    )
    recorded = core.handle(exited, 4.0)
    assert replayed.adopt(exited, 4.0, recorded) is None
    assert replayed.snapshot() == core.snapshot()

    older = running()
    stopped = FinishJob(
        id=f"{older.state.seq + 1}.0",
        cause="1",
        why="an older version gave up here",
        outcome=Outcome.FAILED,
        exit_code=1,
    )
    difference = older.adopt(exited, 4.0, [stopped])
    assert difference is not None
    assert difference.recorded == (stopped,)
    assert older.state.finish == stopped


def test_a_replay_that_would_decide_more_says_so_and_does_not() -> None:
    core = running()
    exited = RankExited(
        machine=MachineId("m0"), generation=Generation(1), rank=Rank(0), exit=ExitStatus(signal=9)
    )
    difference = core.adopt(exited, 4.0, [])
    assert difference is not None
    assert core.state.generation == 1


def test_a_machine_that_fetches_shards_gets_more_time_to_start() -> None:
    story = (Path(__file__).parents[1] / "transcripts" / "backed_up.txt").read_text()
    before, _, _ = story.partition("> 30.3 started")
    transcript = Transcript()
    transcript.run(before + "> 30.3 started m0\n> 90.2 TimerFired\n")
    assert transcript.core.next_deadline() == 30.2 + 60.0 + 300.0


def test_a_peer_whose_agent_is_away_for_a_moment_still_counts_as_having_the_backups() -> None:
    story = (Path(__file__).parents[1] / "transcripts" / "backed_up.txt").read_text()
    before, _, _ = story.partition("> 30.2 stopped m2")
    transcript = Transcript()
    transcript.run(before + "> 30.15 MachineSilent m0\n> 30.2 stopped m2\n")

    (start,) = [
        a for a in transcript.core.outstanding(MachineId("m2")) if isinstance(a, StartRanks)
    ]
    assert start.restore == 20
    assert [(peer.rank, peer.machine) for peer in start.fetch] == [(2, "m0"), (3, "m0")]


def test_backups_that_come_too_late_are_tried_again_at_once_and_further_ahead() -> None:
    transcript = Transcript()
    transcript.run("> 0 job nnodes=2 nproc=1 disk_every=0\n> 1 join m0 m1 shard_port=7000\n")
    transcript.run("> 2 stopped m0 m1\n> 3 started m0 m1\n> 4 progress 0 step_s=0.05\n")
    core, chosen, now = transcript.core, [], 4.0
    for _ in range(7):
        orders = [a for a in core.state.outstanding.values() if isinstance(a, BackUpStep)]
        if not orders:
            break
        chosen.append(orders[0].step)
        now += 0.01
        for order in orders:
            assert order.machine is not None
            core.handle(
                BackupFailed(
                    machine=order.machine, action=order.id, step=order.step, reason="x", late=True
                ),
                now,
            )
    assert chosen == [10, 20, 30, 50, 90]  # from 0.25 s to 4 s ahead, in multiples of ten steps
    assert core.state.backup_not_before == now + BACKUP_RETRY_S
    assert core.next_deadline() == core.state.backup_not_before


def test_silence_does_not_prove_a_restart() -> None:
    transcript = Transcript()
    transcript.run(
        "> 0 job nnodes=2 nproc=1 standbys=1 disk_every=0\n> 1 join m0 m1 m2\n> 2 stopped m0 m1\n"
        "> 3 started m0 m1\n> 4 MachineLost m1 witness=gone\n> 5 stopped m0\n> 5.1 stopped m2\n"
        "> 6 started m0 m2\n> 7 MachineSilent m2\n> 66.5 TimerFired\n"
    )
    assert transcript.core.state.incident is not None, "its rank may have ended unheard"
    transcript.run("> 66.6 join m2 generation=2 ranks=1:2\n")
    assert transcript.core.state.incident is None
