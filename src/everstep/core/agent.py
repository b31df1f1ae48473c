"""The agent's core: which order is stale, what is answered already, what the controller is told.

Driven by agent/shell.py on a real machine and by the simulator's machines. It never touches a
process itself: it asks its shell (agent_io.py) and is told the result.

Three rules keep a machine safe whatever the network does:
  * an order of a lower term than the highest heard of is refused, and so is one of a lower
    generation; ranks start only where the older ones were stopped for this very generation;
  * an order is carried out once: seen again, its answer is given again;
  * progress is the lease: without a controller and without progress for `PolicySpec.lease_s` the
    ranks are stopped; while they advance they are left alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, get_args

from msgspec.structs import replace

from everstep.actions import (
    BackUpStep,
    CollectStacks,
    HoldVersion,
    InjectFault,
    Order,
    PersistStep,
    ProbeMachine,
    ReleaseMachine,
    SendStacks,
    StartRanks,
    StopRanks,
    TestMachine,
    TryVersion,
)
from everstep.core.agent_io import (
    ActivityRead,
    AgentAction,
    AgentEvent,
    BackUpShards,
    ChecksRead,
    ControllerConnected,
    ControllerDisconnected,
    DoFault,
    DoProbe,
    DoTest,
    FetchVersion,
    FindingsRead,
    ForkFailed,
    ForkRanks,
    GiveStacks,
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
    TakeStacks,
    Told,
    TryImports,
)
from everstep.core.quietness import Telling
from everstep.events import (
    AlertCleared,
    AlertRaised,
    EvidenceFound,
    MachineGroups,
    MachineProgress,
    RankExited,
    RanksStarted,
    RanksStopped,
    RanksSurvived,
    Report,
    StartFailed,
    TimerFired,
)
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    Generation,
    MachineId,
    PolicySpec,
    Rank,
    RankStatus,
    Seconds,
    Step,
    Term,
)
from everstep.sightings import BadNumber, LossesCompared, MachineNumbers, Numbers

ANSWERS_KEPT = 64
"""Answers remembered for orders seen again. A controller has one order of each kind in flight."""
FINDINGS_MAX = 100
"""Of one generation."""
NUMBERS_MAX = 500
"""Steps whose numbers are told at a time: the newest ones. Enough for what a script prints in the
seconds in which a busy machine lets its agent read nothing."""
UNSAID_MAX = 200
"""What checks say that is kept while there is no controller: the newest."""
REPORT_EVERY_S: Seconds = 1.0
"""Progress is told at most this often, except the first step of a generation."""


Answer = RanksStopped | RanksSurvived | RanksStarted | StartFailed | Told
"""Reports that name the order they answer."""


_Plain = (
    PersistStep
    | BackUpStep
    | ProbeMachine
    | HoldVersion
    | TryVersion
    | TestMachine
    | CollectStacks
    | SendStacks
    | InjectFault
)
_PLAIN: dict[type[Order], type[AgentAction]] = {
    PersistStep: PersistShards,
    BackUpStep: BackUpShards,
    ProbeMachine: DoProbe,
    HoldVersion: FetchVersion,
    TryVersion: TryImports,
    TestMachine: DoTest,
    CollectStacks: TakeStacks,
    SendStacks: GiveStacks,
    InjectFault: DoFault,
}
"""Orders that there is nothing to decide about here."""
_OUTLAST_RANKS = (HoldVersion, TryVersion, TestMachine)
"""Orders that are about the machine, not about its ranks: a restart does not call them off."""


class AgentCore:
    """Facts of one machine in, actions for its shell out."""

    def __init__(self, machine: MachineId, policy: PolicySpec, local_ranks: int) -> None:
        self.machine = machine
        self.policy = policy
        self._local_ranks = local_ranks
        self.term = Term(0)
        self.generation: Generation = NO_GENERATION
        self.ranks: dict[Rank, RankStatus] = {}
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._working: dict[str, type[Order]] = {}
        """Ids of the orders that the shell is carrying out, and what they are."""
        self._leases = 0
        self._stopping: str | None = None
        """Id of the KillRanks whose result is awaited."""
        self._alone_since: Seconds | None = 0.0
        self._progress_at: Seconds = 0.0
        self._slowest: Step = NO_STEP
        self._told: Step = NO_STEP
        self._told_at: Seconds = 0.0
        self._groups: MachineGroups | None = None
        self._findings_of: Generation = NO_GENERATION
        self._findings_told = 0
        self._numbers: tuple[Numbers, ...] = ()
        self._numbers_told_at: Seconds = float("-inf")
        self._bad_told: tuple[Generation, BadNumber | None, BadNumber | None] | None = None
        self._activity = Telling()
        self._unsaid: list[tuple[Seconds, AlertRaised | AlertCleared]] = []
        self._out: list[AgentAction] = []

    def handle(self, event: AgentEvent, now: Seconds) -> list[AgentAction]:
        """Take one fact and say what to do about it."""
        self._out = []
        _HANDLERS[type(event)](self, event, now)
        return self._out

    def next_deadline(self) -> Seconds | None:
        """When the lease of running ranks ends; None while there is nothing to end."""
        if self._alone_since is None or not self.running or self._stopping is not None:
            return None
        return max(self._alone_since, self._progress_at) + self.policy.lease_s

    @property
    def running(self) -> list[RankStatus]:
        """Ranks that run, as far as is known."""
        return [status for status in self.ranks.values() if status.exit is None]

    # --- orders ---

    def order_received(self, event: OrderReceived, now: Seconds) -> None:
        if event.term < self.term:
            return
        self.term = event.term
        order = event.order
        answer = self._answers.get(order.id)
        if answer is not None:
            self._say(answer, order.id)
        elif order.id not in self._working:
            _ORDERS[type(order)](self, order, now)

    def stop_ranks(self, order: StopRanks, now: Seconds) -> None:
        del now
        if order.generation < self.generation:
            return
        self.generation = order.generation
        outlast = {key: kind for key, kind in self._working.items() if kind in _OUTLAST_RANKS}
        self._working = {**outlast, order.id: StopRanks}
        self._stopping = order.id
        self._out.append(
            KillRanks(
                id=order.id,
                cause=order.cause,
                why=order.why,
                generation=order.generation,
                grace_s=order.grace_s,
                within_s=order.within_s,
                saved_within_s=order.saved_within_s,
            )
        )

    def start_ranks(self, order: StartRanks, now: Seconds) -> None:
        if order.generation < self.generation:
            return
        if any(s.generation == order.generation for s in self.ranks.values()):
            self._answer(self._found_started(order))
            return
        if self.running or self._stopping is not None:
            older = ", ".join(str(s.pid) for s in self.running) or "being stopped"
            reason = f"ranks of an older generation are still here (pids {older})"
            self._answer(self._start_failed(order.id, order.generation, reason))
            return
        if order.generation > self.generation:
            # Booted anew since it was stopped: what the order restores is gone, and its ranks may
            # have run before that, so that those of others wait for them for ever.
            reason = f"nothing here remembers that generation {order.generation} was prepared"
            self._answer(self._start_failed(order.id, order.generation, reason))
            return
        self.ranks = {}
        self._slowest = self._told = NO_STEP
        self._groups = None
        self._numbers = ()
        self._activity.ranks_start()
        self._progress_at = now
        self._working[order.id] = StartRanks
        self._out.append(ForkRanks(id=order.id, cause=order.cause, why=order.why, order=order))

    def _found_started(self, order: StartRanks) -> RanksStarted | StartFailed:
        """A former agent of this machine forked them and died before it could say so.

        Never again, even if they have ended since: that would drop what they saved. Their ends are
        told by themselves.
        """
        self.generation = order.generation
        found = sum(s.generation == order.generation for s in self.ranks.values())
        if found == self._local_ranks:
            return RanksStarted(machine=self.machine, action=order.id, generation=order.generation)
        reason = f"only {found} of {self._local_ranks} ranks were forked when its agent died"
        return self._start_failed(order.id, order.generation, reason)

    def _start_failed(self, action: str, generation: Generation, reason: str) -> StartFailed:
        return StartFailed(
            machine=self.machine, action=action, generation=generation, reason=reason
        )

    def carry_out(self, order: _Plain, now: Seconds) -> None:
        """The shell does it, whatever else is under way, and its words are the answer."""
        del now
        kind = type(order)
        self._working[order.id] = kind
        act: Any = _PLAIN[kind]
        self._out.append(act(id=order.id, cause=order.cause, why=order.why, order=order))

    def release_machine(self, order: ReleaseMachine, now: Seconds) -> None:
        del now
        self._working[order.id] = ReleaseMachine
        self._out.append(LeaveMachine(id=order.id, cause=order.cause, why=order.why))

    # --- results ---

    def ranks_forked(self, event: RanksForked, now: Seconds) -> None:
        self._progress_at = now
        for status in event.ranks:
            self.ranks.setdefault(status.rank, status)
        self._finish(
            RanksStarted(machine=self.machine, action=event.action, generation=event.generation)
        )

    def fork_failed(self, event: ForkFailed, now: Seconds) -> None:
        del now
        self._finish(self._start_failed(event.action, event.generation, event.reason))

    def ranks_gone(self, event: RanksGone, now: Seconds) -> None:
        del now
        if event.action != self._stopping:
            return
        self._stopping = None
        if (
            event.action not in self._working
        ):  # the lease ended: the dead ranks are told of when there is a controller
            return
        # Those of the generation itself are left: a controller that lost its records may ask twice.
        kept = {rank: s for rank, s in self.ranks.items() if s.generation >= event.generation}
        self.ranks = kept
        self._finish(
            RanksStopped(
                machine=self.machine,
                action=event.action,
                generation=event.generation,
                store_port=event.store_port,
                copies=event.copies,
                backups=event.backups,
                local_disk=event.local_disk,
                finished=event.finished,
                finished_age_s=event.finished_age_s,
            )
        )

    def ranks_remain(self, event: RanksRemain, now: Seconds) -> None:
        del now
        if event.action != self._stopping:
            return
        self._stopping = None
        self._finish(
            RanksSurvived(
                machine=self.machine,
                action=event.action,
                generation=event.generation,
                pids=event.pids,
                reason=event.reason,
            )
        )

    def rank_exited(self, event: RankExited, now: Seconds) -> None:
        """An end that was ordered is no news; any other is told once."""
        del now
        known = self.ranks.get(event.rank)
        if known is not None and known.exit is not None and known.generation == event.generation:
            return
        in_the_books = known is not None and known.generation == event.generation
        if event.generation < self.generation and not in_the_books:
            return  # heard late: its generation was proven gone, and this one's rank may run
        self.ranks[event.rank] = RankStatus(
            rank=event.rank,
            generation=event.generation,
            pid=known.pid if known is not None else 0,
            exit=event.exit,
        )
        if event.generation == self.generation and self._stopping is None:
            self._say(event, str(event.generation))

    def answered(self, event: Told, now: Seconds) -> None:
        """The shell's own words are the answer."""
        del now
        self._finish(event)

    # --- progress and the lease ---

    def slots_read(self, event: SlotsRead, now: Seconds) -> None:
        if event.generation != self.generation:
            return
        if event.slowest > self._slowest:
            self._slowest = event.slowest
            self._progress_at = now
        first = self._told == NO_STEP and event.slowest > NO_STEP
        tells = event.slowest > NO_STEP or event.attached
        due = now - self._told_at >= REPORT_EVERY_S and tells
        if not first and not due:
            return
        self._told, self._told_at = event.slowest, now
        self._say(
            MachineProgress(
                machine=self.machine,
                generation=event.generation,
                slowest=event.slowest,
                fastest=event.fastest,
                step_s=event.step_s,
                age_s=now - self._progress_at,
                loss=event.loss,
                attached=event.attached,
                phase=event.phase,
                phase_s=event.phase_s,
                computes=event.computes,
            ),
            str(event.generation),
        )

    def numbers_read(self, event: NumbersRead, now: Seconds) -> None:
        """Told once a second, but at once what is not finite."""
        if event.generation != self.generation:
            return
        self._numbers = (*self._numbers, *event.numbers)[-NUMBERS_MAX:]
        bad = (event.generation, event.bad, event.differs)
        new_bad = bad != self._bad_told and (event.bad or event.differs) is not None
        due = now - self._numbers_told_at >= REPORT_EVERY_S and bool(self._numbers)
        if not new_bad and not due:
            return
        self._bad_told = bad
        self._numbers_told_at = now
        told, self._numbers = self._numbers, ()
        self._say(
            MachineNumbers(
                machine=self.machine,
                generation=event.generation,
                rank=event.rank,
                logged=event.logged,
                numbers=told,
                bad=event.bad,
                differs=event.differs,
            ),
            str(event.generation),
        )

    def activity_read(self, event: ActivityRead, now: Seconds) -> None:
        """What waits for a controller would be old when it comes: it is told anew."""
        if event.generation != self.generation or self._alone_since is not None:
            return
        told = self._activity.take(self.machine, event, self.policy, now)
        if told is not None:
            self._say(told, str(event.generation))

    def findings_read(self, event: FindingsRead, now: Seconds) -> None:
        """The first of a generation; a flood of different ones says no more than they do."""
        del now
        if event.generation != self.generation:
            return
        if self._findings_of != event.generation:
            self._findings_of, self._findings_told = event.generation, 0
        told = event.findings[: FINDINGS_MAX - self._findings_told]
        self._findings_told += len(told)
        if told:
            self._say(
                EvidenceFound(machine=self.machine, generation=event.generation, findings=told),
                str(event.generation),
            )

    def checks_read(self, event: ChecksRead, now: Seconds) -> None:
        """Of the machine, whatever generation it runs.

        Kept while there is no controller: one that has not heard of this machine could not note it,
        and what waits grows older.
        """
        if self._alone_since is not None:
            self._unsaid = [*self._unsaid, *((now, said) for said in event.said)][-UNSAID_MAX:]
            return
        for said in event.said:
            self._say(said, "checks")

    def _say_unsaid(self, now: Seconds) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for since, said in unsaid:
            if isinstance(said, AlertRaised):
                older = replace(said.alert, age_s=said.alert.age_s + now - since)
                self._say(replace(said, alert=older), "checks")
            else:
                self._say(said, "checks")

    def groups_read(self, event: GroupsRead, now: Seconds) -> None:
        del now
        if event.generation == self.generation:
            self._groups = MachineGroups(
                machine=self.machine, generation=event.generation, seen=event.seen
            )
            self._say(self._groups, str(event.generation))

    def losses_compared(self, event: LossesCompared, now: Seconds) -> None:
        del now
        if event.generation == self.generation:
            self._say(event, str(event.generation))

    def controller_connected(self, event: ControllerConnected, now: Seconds) -> None:
        """Another controller may not have heard of the groups: nobody journals one machine's."""
        self.term = max(self.term, event.term)
        self._alone_since = None
        if self._groups is not None and self._groups.generation == self.generation:
            self._say(self._groups, str(self.generation))
        self._say_unsaid(now)

    def controller_disconnected(self, event: ControllerDisconnected, now: Seconds) -> None:
        del event
        if self._alone_since is None:
            self._alone_since = now

    def ranks_adopted(self, event: RanksAdopted, now: Seconds) -> None:
        self.generation = event.generation
        self.ranks = {status.rank: status for status in event.ranks}
        self._progress_at = self._alone_since = now

    def timer_fired(self, event: TimerFired, now: Seconds) -> None:
        del event
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        self._leases += 1
        self._stopping = f"lease-{self.generation}-{self._leases}"
        self._out.append(
            KillRanks(
                id=self._stopping,
                cause="lease",
                why=f"no controller and no progress for {self.policy.lease_s:g} s",
                generation=Generation(self.generation + 1),
                grace_s=0.0,
                within_s=self.policy.gone_within_s,
            )
        )

    # --- saying things ---

    def _finish(self, report: Answer) -> None:
        """Answer the order that was being carried out; nobody waits for what was called off."""
        if report.action in self._working:
            del self._working[report.action]
            self._answer(report)

    def _answer(self, report: Answer) -> None:
        self._answers[report.action] = report
        while len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        self._say(report, report.action)

    def _say(self, report: Report, cause: str) -> None:
        name = type(report).__name__
        self._out.append(
            SendReport(
                id=f"{cause}.{name}", cause=cause, why="the controller is told", report=report
            )
        )


_ORDERS: dict[type[Order], Callable[[AgentCore, Any, Seconds], None]] = {
    StopRanks: AgentCore.stop_ranks,
    StartRanks: AgentCore.start_ranks,
    ReleaseMachine: AgentCore.release_machine,
    **dict.fromkeys(_PLAIN, AgentCore.carry_out),
}

_HANDLERS: dict[type[AgentEvent], Callable[[AgentCore, Any, Seconds], None]] = {
    OrderReceived: AgentCore.order_received,
    ControllerConnected: AgentCore.controller_connected,
    ControllerDisconnected: AgentCore.controller_disconnected,
    RanksAdopted: AgentCore.ranks_adopted,
    RanksForked: AgentCore.ranks_forked,
    ForkFailed: AgentCore.fork_failed,
    RanksGone: AgentCore.ranks_gone,
    RanksRemain: AgentCore.ranks_remain,
    RankExited: AgentCore.rank_exited,
    SlotsRead: AgentCore.slots_read,
    NumbersRead: AgentCore.numbers_read,
    ActivityRead: AgentCore.activity_read,
    FindingsRead: AgentCore.findings_read,
    ChecksRead: AgentCore.checks_read,
    GroupsRead: AgentCore.groups_read,
    LossesCompared: AgentCore.losses_compared,
    TimerFired: AgentCore.timer_fired,
    **dict.fromkeys(get_args(Told), AgentCore.answered),
}
