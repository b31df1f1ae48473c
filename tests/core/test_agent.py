"""The agent's core: stale orders, doubled orders, lost controllers."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from everstep.actions import (
    BackUpStep,
    HoldVersion,
    InjectFault,
    PersistStep,
    ProbeMachine,
    ReleaseMachine,
    StartRanks,
    StopRanks,
    TestMachine,
    TryVersion,
)
from everstep.core.agent import ANSWERS_KEPT, AgentCore
from everstep.core.agent_io import (
    ActivityRead,
    AgentAction,
    BackUpShards,
    ChecksRead,
    ControllerConnected,
    ControllerDisconnected,
    DoFault,
    DoProbe,
    DoTest,
    FetchVersion,
    ForkFailed,
    ForkRanks,
    GroupsRead,
    KillRanks,
    LeaveMachine,
    NumbersRead,
    OrderReceived,
    PersistShards,
    RanksAdopted,
    RanksForked,
    RanksGone,
    RanksRemain,
    SendReport,
    SlotsRead,
    TryImports,
)
from everstep.diagnosis.words import Verdict
from everstep.events import (
    AlertCleared,
    AlertRaised,
    BackupFailed,
    MachineGroups,
    MachineProbed,
    MachineProgress,
    MachineTested,
    RankExited,
    RanksStarted,
    RanksStopped,
    RanksSurvived,
    StartFailed,
    StepPersisted,
    TimerFired,
    VersionHeld,
    VersionTried,
)
from everstep.health import Alert, Result
from everstep.model import (
    ExitStatus,
    Fault,
    Generation,
    MachineId,
    NodeRank,
    PolicySpec,
    Rank,
    RankStatus,
    SeenGroups,
    Step,
    Term,
    VersionId,
)
from everstep.sightings import BadNumber, MachineActivity, MachineNumbers, Numbers

M0 = MachineId("m0")
T = TypeVar("T")


def stop(generation: int, key: str = "") -> StopRanks:
    return StopRanks(
        id=key or f"stop-{generation}",
        cause="1",
        why="test",
        machine=M0,
        generation=Generation(generation),
    )


def start(generation: int) -> StartRanks:
    return StartRanks(
        id=f"start-{generation}",
        cause="1",
        why="test",
        machine=M0,
        generation=Generation(generation),
        node_rank=NodeRank(0),
        master_addr="127.0.0.1",
        master_port=1,
        restore=Step(-1),
        restore_generation=Generation(0),
        restarts=0,
    )


def status(rank: int, generation: int, signal: int | None = None) -> RankStatus:
    return RankStatus(
        rank=Rank(rank),
        generation=Generation(generation),
        pid=100 + rank,
        exit=None if signal is None else ExitStatus(signal=signal),
    )


def gone(generation: int) -> RanksGone:
    return RanksGone(
        action=f"stop-{generation}", generation=Generation(generation), store_port=7, copies=()
    )


def forked(generation: int) -> RanksForked:
    return RanksForked(
        action=f"start-{generation}",
        generation=Generation(generation),
        ranks=(status(0, generation), status(1, generation)),
    )


def exited(rank: int, generation: int) -> RankExited:
    return RankExited(
        machine=M0,
        generation=Generation(generation),
        rank=Rank(rank),
        exit=ExitStatus(signal=9),
    )


class Agent:
    """A core with a clock and short ways to talk to it."""

    def __init__(self) -> None:
        self.core = AgentCore(M0, PolicySpec(), local_ranks=2)
        self.now = 0.0
        self.tell(ControllerConnected(term=Term(1)))

    def tell(self, event: object) -> list[AgentAction]:
        return self.core.handle(event, self.now)  # type: ignore[arg-type]

    def order(self, order: object, term: int = 1) -> list[AgentAction]:
        return self.tell(OrderReceived(term=Term(term), order=order))  # type: ignore[arg-type]

    def started(self, generation: int) -> None:
        self.order(stop(generation))
        self.tell(gone(generation))
        self.order(start(generation))
        self.tell(forked(generation))


def only(actions: list[AgentAction], kind: type[T]) -> T:
    assert len(actions) == 1, actions
    found = actions[0].report if isinstance(actions[0], SendReport) else actions[0]
    assert isinstance(found, kind), found
    return found


def test_stop_then_start_answers_both_orders() -> None:
    agent = Agent()
    assert only(agent.order(stop(1)), KillRanks).generation == 1
    assert only(agent.tell(gone(1)), RanksStopped).store_port == 7
    assert only(agent.order(start(1)), ForkRanks).order.id == "start-1"
    assert only(agent.tell(forked(1)), RanksStarted).action == "start-1"


def test_an_order_seen_again_is_answered_again_and_not_done_again() -> None:
    agent = Agent()
    assert agent.order(stop(1))
    assert agent.order(stop(1)) == []
    agent.tell(gone(1))
    assert only(agent.order(stop(1)), RanksStopped).action == "stop-1"


def test_orders_of_a_fenced_controller_are_refused() -> None:
    agent = Agent()
    agent.tell(ControllerConnected(term=Term(2)))
    assert agent.order(stop(1), term=1) == []
    assert agent.order(stop(1), term=2)


def test_orders_of_an_older_generation_are_refused() -> None:
    agent = Agent()
    agent.started(3)
    assert agent.order(stop(2)) == []
    assert agent.order(start(2)) == []


def test_ranks_are_not_started_beside_old_ones() -> None:
    agent = Agent()
    agent.started(1)
    assert "pids 100, 101" in only(agent.order(start(2)), StartFailed).reason


def test_an_agent_that_was_booted_anew_does_not_start_what_it_was_stopped_for_before() -> None:
    """It may have started the same ranks already, and has lost what they were to restore."""
    before = Agent()
    before.order(stop(2))
    before.tell(gone(2))
    anew = Agent()
    refused = only(anew.order(start(2)), StartFailed)
    assert (refused.action, refused.generation) == ("start-2", 2)
    assert "remembers" in refused.reason
    anew.order(stop(3))
    anew.tell(gone(3))
    assert only(anew.order(start(3)), ForkRanks)


def test_an_agent_that_took_over_starts_what_its_machine_was_stopped_for() -> None:
    """Killed between the two orders; memory is there still."""
    agent = Agent()
    agent.tell(RanksAdopted(generation=Generation(2), ranks=()))
    assert only(agent.order(start(2)), ForkRanks)


def test_ranks_are_not_started_while_old_ones_are_being_stopped() -> None:
    agent = Agent()
    agent.order(stop(1))
    assert "being stopped" in only(agent.order(start(1)), StartFailed).reason


def test_an_agent_that_forked_and_died_answers_when_it_is_asked_again() -> None:
    agent = Agent()
    agent.tell(RanksAdopted(generation=Generation(4), ranks=(status(0, 4), status(1, 4))))
    assert only(agent.order(start(4)), RanksStarted).generation == 4


def test_ranks_of_a_generation_are_forked_once_even_if_they_ended_before_the_answer() -> None:
    """A second fork would drop every step that the first ranks saved."""
    agent = Agent()
    agent.tell(RanksAdopted(generation=Generation(4), ranks=(status(0, 4, 9), status(1, 4, 9))))
    assert only(agent.order(start(4)), RanksStarted).generation == 4


def test_ranks_that_a_former_agent_forked_in_part_are_a_failed_start() -> None:
    agent = Agent()
    agent.tell(RanksAdopted(generation=Generation(4), ranks=(status(0, 4),)))
    assert "only 1 of 2 ranks" in only(agent.order(start(4)), StartFailed).reason


def test_asked_to_stop_for_the_generation_that_runs_its_ranks_are_not_forgotten() -> None:
    """A controller that lost its last records asks a second time."""
    agent = Agent()
    agent.started(1)
    agent.order(stop(1, "again"))
    agent.tell(RanksGone(action="again", generation=Generation(1), store_port=7))
    assert len(agent.core.running) == 2


def test_ranks_that_will_not_go_are_named() -> None:
    agent = Agent()
    agent.order(stop(1))
    remain = RanksRemain(action="stop-1", generation=Generation(1), pids=(5, 6))
    assert only(agent.tell(remain), RanksSurvived).pids == (5, 6)
    assert agent.tell(remain) == []
    assert agent.tell(gone(1)) == []


def test_a_fork_that_fails_is_told() -> None:
    agent = Agent()
    agent.order(stop(1))
    agent.tell(gone(1))
    agent.order(start(1))
    failed = ForkFailed(action="start-1", generation=Generation(1), reason="no launcher")
    assert only(agent.tell(failed), StartFailed).reason == "no launcher"


def test_the_end_of_a_rank_is_told_once() -> None:
    agent = Agent()
    agent.started(1)
    assert only(agent.tell(exited(1, 1)), RankExited).rank == 1
    assert agent.tell(exited(1, 1)) == []


def test_the_end_that_was_ordered_is_no_news() -> None:
    agent = Agent()
    agent.started(1)
    agent.order(stop(2))
    assert agent.tell(exited(0, 1)) == []


def test_an_end_heard_after_the_next_generation_began_does_not_hide_the_rank_that_runs() -> None:
    agent = Agent()
    agent.started(1)
    agent.order(stop(2))
    agent.tell(gone(2))
    agent.order(start(2))
    assert agent.tell(exited(0, 1)) == []
    agent.tell(forked(2))
    assert agent.tell(exited(1, 1)) == []
    assert [rank.generation for rank in agent.core.running] == [2, 2]
    assert only(agent.tell(exited(0, 2)), RankExited).generation == 2


def test_first_progress_is_told_at_once_and_then_once_a_second() -> None:
    agent = Agent()
    agent.started(1)

    def slots(step: int) -> SlotsRead:
        return SlotsRead(generation=Generation(1), slowest=Step(step), fastest=Step(step))

    agent.now = 5.0
    assert agent.tell(slots(-1)) == []
    assert only(agent.tell(slots(0)), MachineProgress).slowest == 0
    agent.now = 5.4
    assert agent.tell(slots(1)) == []
    agent.now = 6.5
    report = only(agent.tell(slots(1)), MachineProgress)
    assert (report.slowest, round(report.age_s, 6)) == (1, 1.1)
    other = SlotsRead(generation=Generation(9), slowest=Step(1), fastest=Step(1))
    assert agent.tell(other) == []


def test_numbers_are_told_once_a_second_and_a_bad_one_at_once() -> None:
    agent = Agent()
    agent.started(1)

    def numbers(step: int, bad: int | None = None) -> NumbersRead:
        return NumbersRead(
            generation=Generation(1),
            numbers=(Numbers(step=Step(step), loss=2.0),),
            bad=None if bad is None else BadNumber(rank=Rank(0), step=Step(bad)),
        )

    assert len(only(agent.tell(numbers(1)), MachineNumbers).numbers) == 1
    assert agent.tell(numbers(2)) == []
    assert agent.tell(numbers(3)) == []
    agent.now += 1.0
    assert [n.step for n in only(agent.tell(numbers(4)), MachineNumbers).numbers] == [2, 3, 4]
    bad = only(agent.tell(numbers(5, bad=5)), MachineNumbers).bad
    assert bad is not None
    assert bad.step == 5
    assert agent.tell(numbers(6, bad=5)) == []


def test_groups_are_told_once_and_again_to_the_next_controller() -> None:
    agent = Agent()
    agent.started(1)
    seen = SeenGroups(odd=("x",))
    told = only(agent.tell(GroupsRead(generation=Generation(1), seen=seen)), MachineGroups)
    assert (told.generation, told.seen) == (1, seen)
    agent.tell(ControllerDisconnected())
    assert only(agent.tell(ControllerConnected(term=Term(1))), MachineGroups) == told
    agent.started(2)
    assert agent.tell(ControllerConnected(term=Term(1))) == []
    assert agent.tell(GroupsRead(generation=Generation(1), seen=seen)) == []


def test_without_controller_and_progress_the_lease_ends() -> None:
    agent = Agent()
    agent.started(1)
    assert agent.core.next_deadline() is None
    agent.now = 10.0
    agent.tell(ControllerDisconnected())
    agent.tell(ControllerDisconnected())
    assert agent.core.next_deadline() == 130.0
    agent.now = 60.0
    agent.tell(SlotsRead(generation=Generation(1), slowest=Step(3), fastest=Step(3)))
    assert agent.core.next_deadline() == 180.0
    agent.now = 179.0
    assert agent.tell(TimerFired()) == []
    agent.now = 180.0
    killed = only(agent.tell(TimerFired()), KillRanks)
    assert killed.generation == 2
    assert agent.core.next_deadline() is None
    agent.tell(exited(0, 1))
    agent.tell(exited(1, 1))
    lease_over = RanksGone(action=killed.id, generation=Generation(2), store_port=0)
    assert agent.tell(lease_over) == []
    assert [s.exit for s in agent.core.ranks.values()] == [ExitStatus(signal=9)] * 2


def test_other_orders_are_handed_on_and_answered_in_the_shells_words() -> None:
    agent = Agent()
    agent.started(1)
    persist = PersistStep(
        id="p", cause="1", why="t", machine=M0, generation=Generation(1), step=Step(10)
    )
    assert only(agent.order(persist), PersistShards).order == persist
    done = StepPersisted(machine=M0, action="p", step=Step(10))
    assert only(agent.tell(done), StepPersisted) == done
    assert agent.tell(done) == []
    backup = BackUpStep(
        id="b",
        cause="1",
        why="t",
        machine=M0,
        generation=Generation(1),
        step=Step(10),
        safe=Step(-1),
        peers=(),
    )
    assert only(agent.order(backup), BackUpShards).order == backup
    failed = BackupFailed(machine=M0, action="b", step=Step(10), reason="full")
    assert only(agent.tell(failed), BackupFailed) == failed
    fault = InjectFault(id="f", cause="1", why="t", fault=Fault.KILL_AGENT, machine=M0)
    assert only(agent.order(fault), DoFault).order == fault
    probe = ProbeMachine(
        id="q",
        cause="1",
        why="t",
        machine=M0,
        target=MachineId("m1"),
        address="a",
        port=1,
        within_s=3.0,
        attempt=1,
    )
    assert only(agent.order(probe), DoProbe).order == probe
    probed = MachineProbed(machine=M0, action="q", target=MachineId("m1"), reachable=False)
    assert only(agent.tell(probed), MachineProbed) == probed
    leave = ReleaseMachine(id="r", cause="1", why="t", machine=M0)
    only(agent.order(leave), LeaveMachine)


def test_what_checks_say_waits_for_a_controller_and_grows_older() -> None:
    """One that has not heard of the machine yet could not note it."""
    agent = Agent()
    agent.tell(ControllerDisconnected())
    result = Result(check="gpu.lost", verdict=Verdict.EVICT, why="it is lost")
    raised = AlertRaised(machine=M0, alert=Alert(result=result, age_s=1.0))
    cleared = AlertCleared(machine=M0, check="gpu.lost")
    assert agent.tell(ChecksRead(said=(raised, cleared))) == []
    agent.now += 30.0
    said = agent.tell(ControllerConnected(term=Term(1)))
    reports = [action.report for action in said if isinstance(action, SendReport)]
    older = AlertRaised(machine=M0, alert=Alert(result=result, age_s=31.0))
    assert [report for report in reports if not isinstance(report, MachineGroups)] == [
        older,
        cleared,
    ]
    assert agent.tell(ControllerConnected(term=Term(1))) == []
    assert only(agent.tell(ChecksRead(said=(raised,))), AlertRaised) == raised


def test_remembered_answers_are_bounded() -> None:
    agent = Agent()
    for number in range(1, ANSWERS_KEPT + 10):
        agent.order(stop(number))
        agent.tell(gone(number))
    newest = stop(ANSWERS_KEPT + 9)
    assert only(agent.order(newest), RanksStopped)


def hold() -> HoldVersion:
    version = VersionId("ab" * 32)
    return HoldVersion(id="hold", cause="1", why="test", machine=M0, version=version, within_s=60.0)


def test_orders_about_the_machine_are_answered_although_a_restart_came_between() -> None:
    version = VersionId("ab" * 32)
    attempt = TryVersion(
        id="try", cause="1", why="test", machine=M0, version=version, within_s=60.0
    )
    look = TestMachine(id="test", cause="1", why="test", machine=M0, attempt=1, within_s=60.0)
    agent = Agent()
    assert only(agent.order(hold()), FetchVersion).order == hold()
    assert only(agent.order(attempt), TryImports).order == attempt
    assert only(agent.order(look), DoTest).order == look
    agent.order(stop(3))
    told = (
        VersionHeld(machine=M0, action="hold", version=version),
        VersionTried(machine=M0, action="try", version=version, problem="SyntaxError"),
        MachineTested(machine=M0, action="test", passed=True, why="all 12 checks"),
    )
    for event in told:
        assert only(agent.tell(event), type(event)) == event
        assert agent.tell(event) == [], "it is answered"
    assert only(agent.order(hold()), VersionHeld) == told[0], "the same answer again"


def test_saving_may_be_waited_for_before_the_kill() -> None:
    order = replace(stop(3), saved_within_s=7.0)
    assert only(Agent().order(order), KillRanks).saved_within_s == 7.0


# --- what ranks do -------------------------------------------------------------------------------


def quiet(for_s: float, generation: int = 1) -> ActivityRead:
    return ActivityRead(generation=Generation(generation), quiet_s=for_s, idle_s=for_s + 1)


def test_quiet_ranks_are_told_from_ten_seconds_on_every_five_and_once_when_it_is_over() -> None:
    agent = Agent()
    agent.started(1)
    assert agent.tell(quiet(0.0)) == []
    assert agent.tell(quiet(9.5)) == []
    first = only(agent.tell(quiet(10.5)), MachineActivity)
    assert (first.machine, first.quiet_s, first.idle_s, first.no_traffic_s) == (
        M0,
        10.5,
        11.5,
        None,
    )
    agent.now += 4.0
    assert agent.tell(quiet(14.5)) == []
    agent.now += 1.0
    assert only(agent.tell(quiet(15.5)), MachineActivity).quiet_s == 15.5
    agent.now += 1.0
    assert only(agent.tell(quiet(0.4)), MachineActivity).quiet_s == 0.0
    assert agent.tell(quiet(0.0)) == []
    assert only(agent.tell(quiet(10.0)), MachineActivity), "told at once when it begins again"


def test_a_policy_that_wants_to_know_of_it_sooner_is_told_sooner() -> None:
    agent = Agent()
    agent.core.policy = PolicySpec(quiet_s=3.0)
    agent.started(1)
    assert agent.tell(quiet(2.9)) == []
    assert only(agent.tell(quiet(3.0)), MachineActivity).quiet_s == 3.0


def test_how_quiet_ranks_are_does_not_wait_for_a_controller() -> None:
    agent = Agent()
    agent.started(1)
    assert agent.tell(quiet(10.0))
    agent.tell(ControllerDisconnected())
    agent.now += 60.0
    assert agent.tell(quiet(70.0)) == []
    assert agent.tell(quiet(0.0)) == []
    agent.tell(ControllerConnected(term=Term(2)))
    assert only(agent.tell(quiet(1.0)), MachineActivity).quiet_s == 0.0


def test_activity_of_another_generation_is_not_told() -> None:
    agent = Agent()
    agent.started(1)
    assert agent.tell(quiet(50.0, generation=2)) == []
    assert agent.tell(quiet(50.0))
    agent.order(stop(2))
    agent.tell(gone(2))
    agent.order(start(2))
    agent.tell(forked(2))
    assert agent.tell(quiet(0.0, generation=2)) == [], "nothing was said of these"
