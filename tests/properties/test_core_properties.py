"""No sequence of facts, legal or not, breaks an invariant, and replay always finds the same state.

Hypothesis makes up what happens to a small job: machines that join, fall silent and are lost, true
and false answers, facts about generations, ranks and machines that do not exist, doubled and late
facts, controllers that are killed at any moment. Every record goes to a real journal.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from everstep.actions import (
    BackUpStep,
    CollectStacks,
    ControllerAction,
    HoldVersion,
    InjectFault,
    PersistStep,
    ProbeMachine,
    PublishStep,
    ReleaseMachine,
    RequestMachines,
    SendStacks,
    StartRanks,
    StopRanks,
    TestMachine,
    TryVersion,
)
from everstep.core.controller import ControllerCore
from everstep.core.faults import objection
from everstep.core.invariants import Watch
from everstep.core.state import Phase, State
from everstep.core.state_check import check_state
from everstep.diagnosis.words import Verdict
from everstep.events import (
    AlertCleared,
    AlertRaised,
    BackupFailed,
    ControllerEvent,
    ControllerStarted,
    FaultInjected,
    FaultRequested,
    JobSubmitted,
    MachineJoined,
    MachineLost,
    MachineProbed,
    MachineReleased,
    MachineSilent,
    MachinesRequested,
    MachineTested,
    PersistFailed,
    RankExited,
    RanksStarted,
    RanksStopped,
    RanksSurvived,
    StartFailed,
    StepBackedUp,
    StepPersisted,
    StepProgress,
    StepPublished,
    StopRequested,
    TimerFired,
)
from everstep.health import Alert, Counts, Result
from everstep.journal import Journal, replay, take_term
from everstep.model import (
    NO_VERSION,
    CheckpointSpec,
    CodeSpec,
    Copy,
    Every,
    ExitStatus,
    Fault,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    PolicySpec,
    Published,
    Rank,
    RankError,
    RankStatus,
    Seconds,
    Step,
    Term,
    VersionId,
)
from tests.properties.code_under_fire import V1, CodeUnderFire, answer_about_code, versions
from tests.properties.looks_under_fire import LooksUnderFire, answer_about_stacks

VERSION = "1"
MACHINES = [MachineId(f"m{n}") for n in range(5)]
machines = st.sampled_from(MACHINES)
newcomers = st.sampled_from([MachineId("m5"), MachineId("m6")])
strangers = st.sampled_from([*MACHINES, MachineId("stranger")])
ages = st.sampled_from([0.0, 0.5, 100.0])
steps = st.integers(-1, 40).map(Step)
exits = st.sampled_from(
    [ExitStatus(code=0), ExitStatus(code=1), ExitStatus(signal=9), ExitStatus()]
)
errors = st.sampled_from(
    [
        None,
        RankError(kind="ValueError", message="wrong", traceback="Traceback"),
        RankError(kind="RuntimeError", message="Connection closed by peer", traceback="Traceback"),
    ]
)
few = st.integers(0, 9).map(lambda number: number == 9)
results = st.builds(
    Result,
    check=st.sampled_from(["gpu.lost", "net.link"]),
    item=st.sampled_from(["", "eth0", "GPU 1"]),
    verdict=st.sampled_from(Verdict),
    why=st.just("it is so"),
    counts=st.sampled_from(Counts),
    cause=st.sampled_from(["", "", "boot b0", "boot b1", "nfs server:/data"]),
)
alerts = st.builds(
    Alert, result=results, source=st.sampled_from(["agent", "alertmanager"]), age_s=ages
)


class CoreUnderFire(CodeUnderFire, LooksUnderFire):
    """One job, its core, its journal."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="everstep-"))
        self.journal = self._open()
        self.core = ControllerCore()
        self.watch = Watch()
        self.now: Seconds = 100.0
        self.told: list[ControllerEvent] = []

    @property
    def state(self) -> State:
        return self.core.state

    def _open(self) -> Journal:
        return Journal(self._directory, take_term(self._directory), version=VERSION)

    def tell(self, event: ControllerEvent) -> None:
        """One turn of the controller's loop, and the judgement of it."""
        actions = self.core.handle(event, self.now)
        self.journal.append(event, self.now, actions=actions)
        self.told.append(event)
        self.watch.see(event, actions, self.now)
        check_state(self.state, self.now)

    # --- the job ---

    @initialize(
        shape=st.tuples(st.integers(1, 3), st.integers(1, 2)),
        standbys=st.integers(0, 2),
        disk_every=st.sampled_from([0, 5]),
        published=st.booleans(),
        recoveries_max=st.integers(1, 5),
        code=st.sampled_from([V1, V1, V1, NO_VERSION]),
    )
    def submit(
        self,
        shape: tuple[int, int],
        standbys: int,
        disk_every: int,
        published: bool,
        recoveries_max: int,
        code: VersionId,
    ) -> None:
        nnodes, nproc = shape
        spec = JobSpec(
            job=JobId("job"),
            uid="00000000",
            command=("train.py",),
            working_dir="/",
            nnodes=nnodes,
            nproc_per_node=nproc,
            standbys=standbys,
            checkpoint=CheckpointSpec(
                directory="/checkpoints", disk_every=Every(steps=disk_every), backup_every=3
            ),
            policy=PolicySpec(
                recoveries_max=recoveries_max,
                silent_s=20.0,
                end_within_s=8.0,
                hold_within_s=10.0,
                ran_well_steps=10,
                retest_after_s=3.0,
                stall_max_s=60.0,
                evictions_max=recoveries_max,
            ),
            code=CodeSpec(version=code),
        )
        on_disk = (Published(step=Step(3), generation=Generation(0)),) if published else ()
        self.tell(JobSubmitted(spec=spec, published=on_disk))
        self.tell(ControllerStarted(term=Term(1), version=VERSION))
        for machine in MACHINES[: nnodes + standbys]:
            self._join(machine)

    # --- time and controllers ---

    @rule(passed=st.sampled_from([0.0, 0.01, 1.0, 7.0]))
    def wait(self, passed: float) -> None:
        self.now += passed

    @rule()
    def timer(self) -> None:
        """At the moment that the core asked for; sometimes for nothing."""
        self.now = max(self.now, self.core.next_deadline() or self.now)
        self.tell(TimerFired())

    @rule(snapshot=st.booleans(), killed_before_append=st.booleans())
    def restart_controller(self, snapshot: bool, killed_before_append: bool) -> None:
        """Replay rebuilds the exact state, and the next term goes on from it."""
        if snapshot:
            self.journal.write_snapshot(self.core.snapshot())
        before = self.core.snapshot()
        if killed_before_append:
            self.core.handle(TimerFired(), self.now)
        self.journal.close()
        self.journal = self._open()
        replayed = replay(self.journal)
        assert replayed.core.snapshot() == before
        assert replayed.next_seq == self.watch.seq + 1
        self.core = replayed.core
        self.tell(ControllerStarted(term=self.journal.term, version=VERSION))

    @rule(by=st.just("somebody"))
    @precondition(lambda self: self.state.generation > 2)
    def ask_to_stop(self, by: str) -> None:
        self.tell(StopRequested(by=by))

    @rule(fault=st.sampled_from(Fault), rank=st.none() | st.integers(-1, 9).map(Rank))
    def ask_for_a_fault(self, fault: Fault, rank: Rank | None) -> None:
        """The controller's server lets through only what has no objection."""
        request = FaultRequested(fault=fault, rank=rank if fault is Fault.KILL_RANK else None)
        if objection(self.state, request) is None:
            self.tell(request)

    # --- machines ---

    def _join(self, machine: MachineId, **more: Any) -> None:
        self.tell(
            MachineJoined(
                machine=machine,
                agent=more.pop("agent", "a1"),
                address=f"addr-{machine}",
                host=more.pop("host", f"host-{machine}"),
                version=VERSION,
                shard_port=7000,
                boot_id=f"b{ord(machine[1]) % 2}",
                units=("switch:s0",) if machine < "m2" else ("switch:s1",),
                **{
                    "generation": self.state.generation,
                    "versions": self.versions_of(machine),
                    **more,
                },
            )
        )

    @rule(machine=newcomers, former=machines, versions=st.sampled_from([(), None]))
    def come_from_a_host(
        self, machine: MachineId, former: MachineId, versions: tuple[VersionId, ...] | None
    ) -> None:
        """Of a machine that was here before, or still is, under another name."""
        self._join(machine, host=f"host-{former}", generation=0, versions=versions)

    @rule(machine=machines, agent=st.sampled_from(["a1", "a2"]), data=st.data())
    def join(self, machine: MachineId, agent: str, data: st.DataObject) -> None:
        """With all its ranks, or with some of them dead or missing."""
        known = self.state.machines.get(machine)
        ranks = []
        if known is not None and known.node_rank is not None:
            for rank in map(Rank, self.state.job.ranks_of(known.node_rank)):
                exit_ = data.draw(st.none() | exits)
                status = RankStatus(rank=rank, generation=self.state.generation, pid=1, exit=exit_)
                ranks += data.draw(st.sampled_from([[status], [status], []]))
        backups = tuple(data.draw(self._copies(), "backups"))
        lost = {"versions": data.draw(st.sampled_from([None, ()]))} if data.draw(few) else {}
        self._join(machine, agent=agent, ranks=tuple(ranks), backups=backups, **lost)

    @rule(machine=strangers, agent=st.sampled_from(["a1", "a2"]))
    def fall_silent(self, machine: MachineId, agent: str) -> None:
        self.tell(MachineSilent(machine=machine, agent=agent))

    @rule(machine=strangers)
    def lose(self, machine: MachineId) -> None:
        self.tell(MachineLost(machine=machine, witness="its keeper is gone"))

    # --- checks ---

    @rule(machine=strangers, alert=alerts)
    def alert(self, machine: MachineId, alert: Alert) -> None:
        self.tell(AlertRaised(machine=machine, alert=alert))

    @rule(machine=strangers, alert=alerts)
    def clear(self, machine: MachineId, alert: Alert) -> None:
        result = alert.result
        cleared = AlertCleared(
            machine=machine, check=result.check, item=result.item, source=alert.source
        )
        self.tell(cleared)

    @precondition(lambda self: self.state.phase is Phase.RUNNING and self.state.positions)
    @rule(data=st.data(), reachable=st.sampled_from([True, False, False, False, None]))
    def cut(self, data: st.DataObject, reachable: bool | None) -> None:
        """A member is silent, and everybody who is asked says the same of it."""
        machine = data.draw(st.sampled_from(sorted(self.state.positions.values())))
        self.tell(MachineSilent(machine=machine, agent=self.state.machines[machine].agent))
        for _ in range(3):
            self.timer()
            for order in self._outstanding():
                if isinstance(order, ProbeMachine):
                    self.tell(_probed(order, reachable))

    # --- answers ---

    def _outstanding(self) -> list[ControllerAction]:
        return list(self.state.outstanding.values())

    @precondition(lambda self: self.state.evictions)
    @rule(data=st.data(), passed=st.sampled_from([True, True, True, False, None]))
    def look_into_evicted(self, data: st.DataObject, passed: bool | None) -> None:
        """Everybody who is asked proves its ranks gone; all tests come out the same."""
        self.now += self.state.job.policy.retest_after_s
        for machine in [m for m in self.state.machines.values() if m.evicted]:
            if not machine.connected:
                self._join(machine.machine, host=machine.host)
        self.tell(TimerFired())
        for order in self._outstanding():
            if isinstance(order, StopRanks) and self.state.machines[order.machine].evicted:
                self.tell(self._stopped(order, data))
        for order in self._outstanding():
            if isinstance(order, TestMachine):
                self.tell(_tested(order, passed))

    @precondition(lambda self: self.state.outstanding)
    @rule(data=st.data(), good=st.sampled_from([True, True, True, False]))
    def answer(self, data: st.DataObject, good: bool) -> None:
        """Any order that waits for an answer gets one, good or bad."""
        order = data.draw(st.sampled_from(self._outstanding()), "order")
        if isinstance(order, StopRanks):
            self.tell(self._stopped(order, data) if good else _survived(order))
        elif isinstance(order, StartRanks):
            self.tell(_started(order) if good else _start_failed(order))
        else:
            self.tell(_ANSWERS[type(order)](order, "" if good else "disk full"))

    @precondition(lambda self: self.state.outstanding)
    @rule(data=st.data())
    def answer_all(self, data: st.DataObject) -> None:
        """Everybody who owes an answer gives a good one: so that long stories get far."""
        for order in self._outstanding():
            if isinstance(order, StopRanks):
                self.tell(self._stopped(order, data))
            elif isinstance(order, StartRanks):
                self.tell(_started(order))
            else:
                self.tell(_ANSWERS[type(order)](order, ""))

    def _stopped(self, order: StopRanks, data: st.DataObject) -> RanksStopped:
        """With copies of any steps and generations for any ranks."""
        return RanksStopped(
            machine=order.machine,
            action=order.id,
            generation=order.generation,
            store_port=29500,
            copies=tuple(data.draw(self._copies(), "copies")),
            backups=tuple(data.draw(self._copies(), "backups")),
            finished=data.draw(steps),
            finished_age_s=data.draw(ages),
        )

    def _copies(self) -> st.SearchStrategy[list[Copy]]:
        """Of any ranks, or one step of all ranks."""
        step = st.integers(3, 5).map(Step)
        generation = st.integers(1, max(1, self.state.generation)).map(Generation)
        one = st.builds(Copy, rank=st.integers(0, 6).map(Rank), step=step, generation=generation)
        ranks = range(self.state.job.world_size)
        whole = st.builds(
            lambda step, generation: [
                Copy(rank=Rank(rank), step=step, generation=generation) for rank in ranks
            ],
            step,
            generation,
        )
        return st.lists(one, max_size=6) | whole

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        """A fact comes a second time, however late. Only agents and clusters repeat themselves."""
        event = data.draw(st.sampled_from(self.told[2:] or self.told[-1:]))
        if not isinstance(event, JobSubmitted | ControllerStarted):
            self.tell(event)

    @precondition(lambda self: self.state.outstanding)
    @rule(data=st.data(), machine=strangers, generation=st.integers(0, 9).map(Generation))
    def answer_for_another(
        self, data: st.DataObject, machine: MachineId, generation: Generation
    ) -> None:
        """The right id, but a machine or generation that it does not belong to."""
        order = data.draw(st.sampled_from(self._outstanding()))
        self.tell(RanksStarted(machine=machine, action=order.id, generation=generation))

    # --- ranks ---

    @rule(
        machine=strangers,
        rank=st.integers(0, 7).map(Rank),
        lag=st.sampled_from([0, 0, 0, 1, -1]),
        exit_=exits,
        error=errors,
        age_s=ages,
    )
    def rank_exits(
        self,
        machine: MachineId,
        rank: Rank,
        lag: int,
        exit_: ExitStatus,
        error: RankError | None,
        age_s: Seconds,
    ) -> None:
        generation = Generation(max(0, self.state.generation - lag))
        self.tell(
            RankExited(
                machine=machine,
                generation=generation,
                rank=rank,
                exit=exit_,
                error=None if exit_.ok else error,
                age_s=age_s,
            )
        )

    @rule(
        lag=st.sampled_from([0, 0, 0, 1, -1]),
        step=steps,
        ahead=st.integers(0, 2),
        step_s=st.sampled_from([None, 0.0, 0.1, 2.0]),
        age_s=ages,
    )
    def progress(
        self, lag: int, step: Step, ahead: int, step_s: Seconds | None, age_s: Seconds
    ) -> None:
        self.now += 1.0
        self.tell(
            StepProgress(
                generation=Generation(max(0, self.state.generation - lag)),
                finished_by_all=step,
                finished_by_one=Step(step + ahead),
                step_s=step_s,
                age_s=age_s,
            )
        )

    @precondition(lambda self: self.state.phase is Phase.RUNNING)
    @rule(steps_on=st.integers(1, 30))
    def train_on(self, steps_on: int) -> None:
        """Real progress, so that recoveries are proven and steps go to disk."""
        step = Step(max(self.state.finished_by_all, self.state.restored) + steps_on)
        self.progress(lag=0, step=step, ahead=1, step_s=0.1, age_s=0.0)

    @precondition(lambda self: self.state.phase is Phase.RUNNING)
    @rule(data=st.data(), version=versions, trained=st.sampled_from([0, 5, 15]))
    def change_code(self, data: st.DataObject, version: VersionId, trained: int) -> None:
        """An update, or a rollback, that everybody helps with, and steps under it."""
        if data.draw(st.booleans()):
            self.send_on(version, urgent=data.draw(st.booleans()))
        else:
            self.roll_back(version=data.draw(st.sampled_from([None, version])))
        for _ in range(3):
            self.answer_all(data=data)
        if trained and self.state.phase is Phase.RUNNING:
            self.train_on(steps_on=trained)

    def teardown(self) -> None:
        try:
            self.restart_controller(snapshot=False, killed_before_append=False)
        finally:
            self.journal.close()
            shutil.rmtree(self._directory)


def _survived(order: StopRanks) -> RanksSurvived:
    return RanksSurvived(
        machine=order.machine, action=order.id, generation=order.generation, pids=(4711,)
    )


def _started(order: StartRanks) -> RanksStarted:
    return RanksStarted(machine=order.machine, action=order.id, generation=order.generation)


def _start_failed(order: StartRanks) -> StartFailed:
    return StartFailed(
        machine=order.machine, action=order.id, generation=order.generation, reason="no launcher"
    )


def _probed(order: ProbeMachine, reachable: bool | None) -> MachineProbed:
    return MachineProbed(
        machine=order.machine, action=order.id, target=order.target, reachable=reachable
    )


def _tested(order: TestMachine, passed: bool | None) -> MachineTested:
    why = "something was found" if passed is False else "nothing was found"
    return MachineTested(machine=order.machine, action=order.id, passed=passed, why=why)


def _persisted(order: PersistStep, reason: str) -> ControllerEvent:
    if reason:
        return PersistFailed(machine=order.machine, action=order.id, step=order.step, reason=reason)
    return StepPersisted(machine=order.machine, action=order.id, step=order.step)


def _backed_up(order: BackUpStep, reason: str) -> ControllerEvent:
    if reason:
        return BackupFailed(machine=order.machine, action=order.id, step=order.step, reason=reason)
    return StepBackedUp(machine=order.machine, action=order.id, step=order.step)


_ANSWERS: dict[type[ControllerAction], Any] = {
    HoldVersion: answer_about_code,
    TryVersion: answer_about_code,
    CollectStacks: answer_about_stacks,
    SendStacks: answer_about_stacks,
    ProbeMachine: lambda order, reason: _probed(order, None if reason else False),
    TestMachine: lambda order, reason: _tested(order, None if reason else True),
    PersistStep: _persisted,
    BackUpStep: _backed_up,
    PublishStep: lambda order, reason: StepPublished(
        action=order.id, step=order.step, generation=order.generation, reason=reason
    ),
    RequestMachines: lambda order, reason: MachinesRequested(action=order.id, reason=reason),
    ReleaseMachine: lambda order, reason: MachineReleased(machine=order.machine, action=order.id),
    InjectFault: lambda order, reason: FaultInjected(
        action=order.id, fault=order.fault, machine=order.machine
    ),
}

TestCoreUnderFire = CoreUnderFire.TestCase
TestCoreUnderFire.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_snapshots_survive_the_trip() -> None:
    core = ControllerCore()
    again = ControllerCore.from_snapshot(core.snapshot())
    assert again.snapshot() == core.snapshot()
    assert msgspec.msgpack.encode(again.state) == msgspec.msgpack.encode(core.state)
