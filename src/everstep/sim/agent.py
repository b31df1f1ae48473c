"""The shell of an agent in a simulated machine: a real AgentCore, a real Link, modelled effects.

It follows agent/shell.py, agent/effects.py and agent/link.py step by step, with delays where those
wait for the operating system, so that what the simulator finds is true of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from everstep import wire
from everstep.actions import StartRanks
from everstep.core.agent import AgentCore
from everstep.core.agent_io import (
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
    KillRanks,
    LeaveMachine,
    OrderReceived,
    PersistShards,
    RanksAdopted,
    RanksForked,
    RanksGone,
    RanksRemain,
    SendReport,
    TakeStacks,
    TryImports,
)
from everstep.diagnosis.findings import Speaker
from everstep.events import (
    UNJOURNALLED,
    AlertCleared,
    AlertRaised,
    FaultInjected,
    MachineJoined,
    MachineProbed,
    MachineReady,
    MachineReleased,
    RankExited,
    Report,
    TimerFired,
)
from everstep.model import (
    NO_STEP,
    Copy,
    ExitStatus,
    Fault,
    Generation,
    Peer,
    RankStatus,
    Seconds,
    Term,
)
from everstep.sim.backing_up import BACKUP, BackingUp
from everstep.sim.code import NOT_FOUND, WRONG_CALL, findings
from everstep.sim.holding import Holding
from everstep.sim.looking import Looking
from everstep.sim.network import Connection
from everstep.sim.parts import cannot_fetch
from everstep.sim.persisting import DISK, LOCAL_DISK, LOOK_AT_SAVES_S, Persisting, Works
from everstep.sim.reading import Reading
from everstep.sim.records import VERSION
from everstep.sim.testing import tested
from everstep.sim.training import Process

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

RETRY_S: Seconds = 0.5
LAST_WORD_WITHIN_S: Seconds = 3.0
SHARD_PORT = 7000
FORKING_S: Seconds = 0.1
SETTLED_S: Seconds = 0.1
"""More than it takes to hear of the end of a killed process."""


class Agent:
    """One agent process."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.alive = True
        self.name = name
        self.connection: Connection | None = None
        """The one that Welcome made usable."""
        self._machine = machine
        self._ground = machine.ground
        spec = self._ground.options.spec
        self._core = AgentCore(machine.name, spec.policy, spec.nproc_per_node)
        self._link = wire.Link()
        self._term = machine.memory.term
        self._greeting: Connection | None = None
        self._forking = False
        self._works = Works()
        self._persisting = Persisting(machine, self._works, self._after, self._tell)
        self._backing_up = BackingUp(machine, self._works, self._after, self._tell)
        self._holding = Holding(machine, self._after, self._tell)
        self._reading = Reading(machine, self._tell)
        self._looking = Looking(machine, self._after, self._tell)

    def start(self) -> None:
        """Adopt what runs, look for a controller, look at the ranks from time to time."""
        self._tell(self._adopt())
        self.checked(*self._machine.monitor.holding(self._ground.schedule.now))
        self._after(self._ground.rng.uniform(0.0, RETRY_S), self._connect)
        self._after(self._ground.options.look_s, self._look)

    def die(self, *, silently: bool = False) -> None:
        """SIGKILL. `silently`: nobody closes its sockets."""
        self.alive = False
        for connection in (self.connection, self._greeting):
            if connection is not None and not silently:
                connection.close()

    # --- the core ---

    def _tell(self, event: AgentEvent) -> None:
        actions = self._core.handle(event, self._ground.schedule.now)
        self._remember()
        for action in actions:
            self._act(action)

    def _act(self, action: AgentAction) -> None:
        if isinstance(action, SendReport):
            self._send(action.report)
        elif isinstance(action, ForkRanks):
            self._fork(action, self._ground.schedule.now)
        elif isinstance(action, KillRanks):
            self._works.cancel(DISK, LOCAL_DISK, BACKUP)
            self._machine.fenced = max(self._machine.fenced, action.generation)
            self._kill(action, self._works.begin("kill"), self._ground.schedule.now)
        elif isinstance(action, LeaveMachine):
            self._works.cancel(DISK, LOCAL_DISK, BACKUP, "kill")
            self._leave(action, 0.0)
        else:
            self._work_on(action)

    def _work_on(self, action: AgentAction) -> None:
        """What has nothing to do with starting and ending."""
        if isinstance(action, PersistShards):
            self._persisting.begin(action)
        elif isinstance(action, BackUpShards):
            self._backing_up.begin(action)
        elif isinstance(action, FetchVersion):
            self._holding.get(action.order)
        elif isinstance(action, TryImports):
            self._holding.try_it(action.order)
        elif isinstance(action, TakeStacks):
            self._looking.take(action.order)
        elif isinstance(action, GiveStacks):
            self._looking.give(action.order)
        elif isinstance(action, DoTest):
            takes_s = self._ground.rng.uniform(0.1, 5.0) * self._machine.slowness
            self._after(takes_s, lambda: self._tell(tested(self._machine, action)))
        elif isinstance(action, DoProbe):
            self._probe(action)
        else:
            assert isinstance(action, DoFault)
            self._do_fault(action)

    def _remember(self) -> None:
        memory, core = self._machine.memory, self._core
        if memory.generation != core.generation:
            memory.told = []
        memory.term, memory.generation = core.term, core.generation
        if self._link.unacked == 0:
            memory.told = [rank for rank, status in core.ranks.items() if status.exit is not None]

    def _after(self, delay_s: Seconds, call: Callable[[], None]) -> None:
        """Plan something that only a living agent does."""
        self._ground.schedule.after(delay_s, partial(self._if_alive, call))

    def _if_alive(self, call: Callable[[], None]) -> None:
        if self.alive:
            call()

    # --- ranks ---

    def _adopt(self) -> RanksAdopted:
        memory, found = self._machine.memory, list(self._machine.processes.values())
        newest = max((process.generation for process in found), default=Generation(0))
        generation = Generation(max(memory.generation, newest))
        told = memory.told if memory.generation == generation else []
        kept = [p for p in found if p.generation == generation or p.alive]
        statuses = []
        for process in kept:
            known = process.generation == generation and process.rank in told
            statuses.append(_status(process, process.exit if known else None))
            if not process.alive and not known:
                self._after(0.01, partial(self.rank_ended, process))
        return RanksAdopted(generation=generation, ranks=tuple(statuses))

    def rank_ended(self, process: Process) -> None:
        """The keeper has noted how it ended."""
        assert process.exit is not None
        if process.error in (NOT_FOUND, WRONG_CALL):
            speaker = Speaker(rank=process.rank, machine=self._machine.name)
            found = findings(process.error, speaker, process.generation)
            self._tell(FindingsRead(generation=process.generation, findings=found))
        self._tell(
            RankExited(
                machine=self._machine.name,
                generation=process.generation,
                rank=process.rank,
                exit=process.exit,
                age_s=self._ground.schedule.now - process.died_at,
                error=process.error,
            )
        )

    def _look(self) -> None:
        """What wakes a real shell at many moments happens here at a few."""
        now = self._ground.schedule.now
        self._reading.look(self._core.generation)
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= now:
            self._tell(TimerFired())
        self._put(*self._link.due(now))
        self._after(self._ground.options.look_s, self._look)

    def _fork(self, action: ForkRanks, since: Seconds) -> None:
        """Ask the launcher, once it is there."""
        policy = self._ground.options.spec.policy
        self._machine.memory.node_rank = action.order.node_rank
        if self._missing(action.order):
            transfer_s = self._ground.options.transfer_s * self._ground.rng.uniform(0.5, 1.5)
            self._after(transfer_s, partial(self._fetch, action))
        elif self._machine.launcher_up:
            self._forking = True
            # The launcher goes on with it even if the agent dies, but not when the machine boots.
            forking_s = FORKING_S * self._machine.slowness
            forked = partial(self._forked, action, self._machine.boots)
            self._ground.schedule.after(forking_s, forked)
        elif self._ground.schedule.now - since >= policy.start_within_s:
            self._fork_failed(action, "the launcher did not answer")
        else:
            self._after(0.2, partial(self._fork_if_wanted, action, since))

    def _missing(self, order: StartRanks) -> list[Peer]:
        """Shards that the order has fetched and that are not here yet."""
        return [
            peer
            for peer in order.fetch
            if _wanted(order, peer) not in self._machine.slots(peer.rank).copies()
        ]

    def _fetch(self, action: ForkRanks) -> None:
        order = action.order
        if self._core.generation != order.generation:
            return
        for slots in self._machine.all_slots():
            slots.drop_newer(order.restore)
        for peer in self._missing(order):
            wanted = _wanted(order, peer)
            problem = cannot_fetch(self._ground, order, peer, wanted)
            if problem:
                self._fork_failed(action, problem)
                return
            self._machine.slots(peer.rank).put(wanted.step, wanted.generation)
        self._fork(action, self._ground.schedule.now)

    def _fork_if_wanted(self, action: ForkRanks, since: Seconds) -> None:
        if self._core.generation == action.order.generation:
            self._fork(action, since)

    def _forked(self, action: ForkRanks, boots: int) -> None:
        machine, nproc = self._machine, self._ground.options.spec.nproc_per_node
        self._forking = False
        if not machine.alive or machine.boots != boots:
            return
        machine.kept.drop_newer(action.order.restore)
        if action.order.restore_nnodes:
            machine.kept.keep_only(action.order.restore)
        broken = machine.breaks_forks > 0 or not machine.launcher_up
        machine.breaks_forks -= machine.breaks_forks > 0
        processes = machine.fork(action.order, self._ground.rng.randint(0, 1) if broken else nproc)
        if not self.alive:
            return
        if broken:
            self._fork_failed(action, "the launcher died while it forked ranks")
            return
        statuses = tuple(_status(process, None) for process in processes)
        generation = action.order.generation
        self._tell(RanksForked(action=action.id, generation=generation, ranks=statuses))

    def _fork_failed(self, action: ForkRanks, reason: str) -> None:
        generation = action.order.generation
        self._tell(ForkFailed(action=action.id, generation=generation, reason=reason))

    def _kill(self, action: KillRanks, token: object, since: Seconds) -> None:
        """A fork under way is awaited; then the old ranks are asked and killed."""
        if not self._works.doing("kill", token):
            return
        if self._forking:
            self._after(FORKING_S, partial(self._kill, action, token, since))
            return
        waited_s = self._ground.schedule.now - since
        if waited_s < action.saved_within_s and self._unsaved(action.generation):
            self._after(LOOK_AT_SAVES_S, partial(self._kill, action, token, since))
            return
        for process in self._doomed(action.generation):
            process.stuck = process.stuck or self._machine.sticks
            self._machine.sticks = False
            if action.grace_s:
                self._machine.kill(process, ExitStatus(signal=15))
        deadline = self._ground.schedule.now + action.within_s
        self._after(0.01, partial(self._prove, action, token, deadline))

    def _unsaved(self, generation: Generation) -> bool:
        """Whether a rank that is to end has finished a step that is not saved yet."""
        now = self._ground.schedule.now
        return any(
            process.finished(now)[0] > NO_STEP and process.memory.free_at > now
            for process in self._doomed(generation)
        )

    def _doomed(self, generation: Generation) -> list[Process]:
        return [p for p in self._machine.running() if p.generation < generation]

    def _prove(self, action: KillRanks, token: object, deadline: Seconds) -> None:
        if not self._works.doing("kill", token):
            return
        for process in self._doomed(action.generation):
            self._machine.kill(process)
        left = self._doomed(action.generation)
        if not left:
            self._after(SETTLED_S * self._machine.slowness, partial(self._gone, action, token))
        elif self._ground.schedule.now < deadline:
            self._after(0.5, partial(self._prove, action, token, deadline))
        else:
            pids = tuple(process.pid for process in left)
            self._tell(RanksRemain(action=action.id, generation=action.generation, pids=pids))

    def _gone(self, action: KillRanks, token: object) -> None:
        if not self._works.doing("kill", token):
            return
        now = self._ground.schedule.now
        beats = [
            process.finished(now)
            for process in self._machine.processes.values()
            if process.generation < action.generation
        ]
        finished, at = min(beats, default=(NO_STEP, now))
        self._tell(
            RanksGone(
                action=action.id,
                generation=action.generation,
                store_port=29500 + action.generation,
                copies=self._copies(),
                backups=self._machine.kept.copies(),
                local_disk=self._machine.local_disk.copies,
                finished=finished,
                finished_age_s=now - at if finished > NO_STEP else 0.0,
            )
        )

    def _copies(self) -> tuple[Copy, ...]:
        return tuple(copy for slots in self._machine.all_slots() for copy in slots.copies())

    # --- checks ---

    def checked(self, *said: AlertRaised | AlertCleared) -> None:
        """The machine's monitor has something to say."""
        if said:
            self._tell(ChecksRead(said=said))

    def _probe(self, action: DoProbe) -> None:
        """At once if the other end answers, else when the time for it is over."""
        target = self._ground.machines[action.order.target]
        answers = target.answers() and self._machine.answers()
        takes_s = 0.01 if answers else action.order.within_s
        self._after(takes_s, partial(self._probed, action, answers=answers))

    def _probed(self, action: DoProbe, *, answers: bool) -> None:
        self._tell(
            MachineProbed(
                machine=self._machine.name,
                action=action.id,
                target=action.order.target,
                reachable=answers,
            )
        )

    # --- other orders ---

    def _do_fault(self, action: DoFault) -> None:
        order, machine = action.order, self._machine
        self._tell(FaultInjected(action=action.id, fault=order.fault, machine=machine.name))
        self._after(0.05, partial(self._inject, order.fault, order.rank))

    def _inject(self, fault: Fault, rank: int | None) -> None:
        machine = self._machine
        if fault is Fault.KILL_RANK:
            for process in [p for p in machine.running() if rank in (None, p.rank)][:1]:
                machine.kill(process)
        elif fault is Fault.KILL_LAUNCHER:
            machine.kill_launcher()
        elif fault is Fault.KILL_AGENT:
            machine.kill_agent()
        else:
            machine.lose()

    def _leave(self, action: LeaveMachine, waited_s: Seconds) -> None:
        """End everything, say so, and go when the controller knows."""
        if self._forking:
            self._after(FORKING_S, partial(self._leave, action, waited_s))
            return
        for process in self._machine.running():
            process.stuck = False
            self._machine.kill(process)
        if not waited_s:
            self._send(MachineReleased(machine=self._machine.name, action=action.id))
        if self._link.unacked and waited_s < LAST_WORD_WITHIN_S:
            self._after(0.1, partial(self._leave, action, waited_s + 0.1))
        else:
            self._machine.leave()

    # --- the controller ---

    def _send(self, report: Report) -> None:
        body = wire.encode_report(report)
        if isinstance(report, UNJOURNALLED):
            self._put(self._link.unreliable(body))
        else:
            self._put(self._link.send(body, self._ground.schedule.now))

    def _put(self, *frames: wire.AnyFrame) -> None:
        if self.connection is not None:
            for frame in frames:
                self.connection.send(self, frame)

    def _connect(self) -> None:
        """Try until a connection stands; a Hello or Welcome that is lost means another try."""
        if self.connection is None:
            if self._greeting is not None:
                self._greeting.close()
            self._greeting = None
            controller = self._ground.controller
            if controller is not None and controller.alive and self._machine.reachable:
                self._greeting = Connection(self._ground, self, controller)
                self._greeting.send(self, self._hello())
        self._after(RETRY_S * self._ground.rng.uniform(2.0, 6.0), self._connect)

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL,
            version=VERSION,
            machine=self._machine.name,
            agent=self.name,
            term=self._term,
            received=self._link.received,
        )

    def receive(self, connection: Connection, frame: wire.AnyFrame) -> None:
        """A frame from the controller."""
        if isinstance(frame, wire.Welcome):
            if connection is self._greeting:
                self._welcomed(connection, frame)
        elif connection is self.connection and isinstance(frame, wire.Data | wire.Bare):
            for seq, body in self._link.receive(frame):
                self._link.delivered(seq)
                directive = wire.decode_directive(body)
                self._tell(OrderReceived(term=directive.term, order=directive.order))
            acknowledgement = self._link.ack_due()
            if acknowledgement is not None and self.alive:
                self._put(acknowledgement)

    def _welcomed(self, connection: Connection, welcome: wire.Welcome) -> None:
        self._greeting = None
        if wire.welcome_problem(welcome, self._term):
            connection.close()
            return
        if welcome.term > self._term:
            self._link.new_peer()
            self._term = Term(welcome.term)
        try:
            frames = self._link.resume(welcome.received, self._ground.schedule.now)
        except wire.SessionLostError:
            self._machine.kill_agent()
            return
        self.connection = connection
        self._put(*frames)
        self._send(self._joined())
        self._tell(ControllerConnected(term=welcome.term))

    def _joined(self) -> MachineJoined:
        return MachineJoined(
            machine=self._machine.name,
            agent=self.name,
            address=f"address-of-{self._machine.name}",
            host=self._machine.host,
            boot_id=self._machine.boot_id,
            units=self._machine.units,
            version=VERSION,
            generation=self._core.generation,
            ranks=tuple(self._core.ranks.values()),
            copies=self._copies(),
            backups=self._machine.kept.copies(),
            local_disk=self._machine.local_disk.copies,
            shard_port=SHARD_PORT if self._ground.options.spec.backs_up else 0,
            versions=tuple(self._machine.code),
            ready=self._machine.launchers > 0,
        )

    def ready(self) -> None:
        """The launcher is warm for the first time."""
        if self.connection is not None:
            self._send(MachineReady(machine=self._machine.name))

    def closed(self, connection: Connection) -> None:
        """The connection is gone."""
        if connection is self._greeting:
            self._greeting = None
        elif connection is self.connection:
            self.connection = None
            self._link.disconnected()
            self._tell(ControllerDisconnected())


def _wanted(order: StartRanks, peer: Peer) -> Copy:
    return Copy(rank=peer.rank, step=order.restore, generation=order.restore_generation)


def _status(process: Process, exit_: ExitStatus | None) -> RankStatus:
    return RankStatus(rank=process.rank, generation=process.generation, pid=process.pid, exit=exit_)
