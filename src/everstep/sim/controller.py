"""The shell of a controller in a simulated world: its sessions with agents, and its hands.

It follows controller/agents.py, controller/act.py and controller/run.py step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep import wire
from everstep.actions import (
    ControllerAction,
    EvictMachine,
    InjectFault,
    Order,
    PublishStep,
    RequestMachines,
)
from everstep.core.controller import ControllerCore
from everstep.core.intake import Intake
from everstep.core.quarantine import taken_away
from everstep.core.state import State
from everstep.events import (
    ControllerEvent,
    ControllerStarted,
    FaultInjected,
    Folded,
    JobSubmitted,
    MachineJoined,
    MachineLost,
    MachineReleased,
    MachineSilent,
    MachinesRequested,
    OutputLines,
    StepPublished,
)
from everstep.journal.records import Origin
from everstep.model import MachineId, Seconds, Value
from everstep.sim.cluster import Cluster
from everstep.sim.ground import Ground
from everstep.sim.loop import Controls, Incoming, Loop
from everstep.sim.network import Connection
from everstep.sim.records import VERSION, MemoryJournal

LOOK_S: Seconds = 0.5
"""Between looks for messages to send again and acknowledgements to send."""
LONG = 100


class _Session:
    def __init__(self, machine: MachineId, agent: str, journalled: int) -> None:
        self.machine = machine
        self.agent = agent
        self.journalled = journalled
        self.link = wire.Link(received=journalled)
        self.connection: Connection | None = None


class Controller:
    """One term."""

    def __init__(self, ground: Ground, cluster: Cluster, on_death: Callable[[], None]) -> None:
        """Take the term, replay the ledger, and say so."""
        self.alive = True
        self._ground = ground
        self._cluster = cluster
        self._on_death = on_death
        self._sessions: dict[MachineId, _Session] = {}
        self._journal = MemoryJournal(ground.ledger, ground.options.snapshot_every)
        core, self._received, _ = ground.ledger.replay()
        controls = Controls(judge=self._judge, survives=self._survives, fenced=self.die)
        self._loop = Loop(
            core=core,
            journal=self._journal,
            schedule=ground.schedule,
            intake=Intake(ground.options.spec.nnodes),
            controls=controls,
        )
        self._begin()

    @property
    def core(self) -> ControllerCore:
        return self._loop.core

    @property
    def state(self) -> State:
        return self._loop.core.state

    def _begin(self) -> None:
        if self.state.spec is None:
            submitted = JobSubmitted(
                spec=self._ground.options.spec, published=tuple(self._ground.disk.published())
            )
            self._loop.take(Incoming(submitted), self._act)
        started = ControllerStarted(term=self._journal.term, version=VERSION)
        if self.alive:
            self._loop.take(Incoming(started), self._act)
        if self.alive:
            self._cluster.report_to(self.report)
            for machine in self.state.machines:
                self._give_back(machine)
            self._loop.run(self._act)
            self._ground.schedule.after(LOOK_S, self._look)

    def _judge(self, event: ControllerEvent, actions: list[ControllerAction], state: State) -> None:
        now = self._ground.schedule.now
        self._ground.tell(f"{now:.3f} {state.seq} {_show(event)}")
        for action in actions:
            self._ground.tell(f"    {action.id} {_show(action)}")
        self._ground.truth.decided(event, actions, state, now)
        self._ground.blame.decided(actions, state, now)

    def _survives(self) -> bool:
        """The dice of a killed turn; once dead, always dead."""
        ground = self._ground
        if not ground.calm and ground.rng.random() < ground.options.killed_in_turn:
            self.die()
        return self.alive

    def report(self, fact: MachineLost) -> None:
        """The cluster says something."""
        self.post(fact)

    def post(self, event: ControllerEvent) -> None:
        """A fact from anybody but an agent."""
        self._loop.post(Incoming(event))

    def die(self) -> None:
        """SIGKILL, or fenced: its sockets close, and its keeper brings the next one."""
        if not self.alive:
            return
        self.alive = False
        for session in self._sessions.values():
            if session.connection is not None:
                session.connection.close()
        self._on_death()

    # --- hands ---

    def _act(self, event: ControllerEvent, actions: list[ControllerAction]) -> None:
        for action in (*actions, *self._repeated(event, actions)):
            self._carry_out(action)
        if isinstance(event, MachineReleased | MachineSilent):
            self._give_back(event.machine)

    def _give_back(self, machine: MachineId) -> None:
        if taken_away(self.state, machine):
            self._cluster.release(machine)

    def _repeated(
        self, event: ControllerEvent, actions: list[ControllerAction]
    ) -> list[ControllerAction]:
        if isinstance(event, MachineJoined):
            repeated = self.core.outstanding(event.machine)
        elif isinstance(event, ControllerStarted):
            repeated = self.core.outstanding(None)
        else:
            return []
        return [action for action in repeated if action not in actions]

    def _carry_out(self, action: ControllerAction) -> None:
        if isinstance(action, InjectFault) and action.machine is None:
            injected = FaultInjected(action=action.id, fault=action.fault)
            self._loop.post(Incoming(injected, then=self._end_myself))
        elif isinstance(action, Order):
            self._order(action)
        elif isinstance(action, EvictMachine):
            self._give_back(action.machine)
        elif isinstance(action, RequestMachines):
            reason = self._cluster.request(action.count, action.id)
            self.post(MachinesRequested(action=action.id, reason=reason))
        elif isinstance(action, PublishStep):
            publish_s = self._ground.options.disk_s * self._ground.rng.uniform(0.1, 1.0)
            self._ground.schedule.after(publish_s, partial(self._publish, action))

    def _end_myself(self) -> None:
        self._journal.sync()
        self.die()

    def _publish(self, action: PublishStep) -> None:
        """A thread of this process does it: it ends with the process."""
        if not self.alive:
            return
        reason = self._ground.disk.publish(
            action.step, action.generation, self.state.job_at(action.generation).world_size
        )
        self.post(
            StepPublished(
                action=action.id, step=action.step, generation=action.generation, reason=reason
            )
        )

    def _order(self, order: Order) -> None:
        session = self._sessions.get(order.machine) if order.machine is not None else None
        if session is None or session.connection is None:
            return
        body = wire.encode_directive(wire.Directive(term=self._journal.term, order=order))
        session.connection.send(self, session.link.send(body, self._ground.schedule.now))

    # --- agents ---

    def receive(self, connection: Connection, frame: wire.AnyFrame) -> None:
        """A frame from an agent."""
        if isinstance(frame, wire.Hello):
            self._welcome(connection, frame)
            return
        session = self._session_of(connection)
        if session is None or not isinstance(frame, wire.Data | wire.Bare):
            return
        for number, body in session.link.receive(frame):
            report = wire.decode_report(body)
            assert not isinstance(report, OutputLines), "nobody prints anything here"
            if isinstance(report, Folded):
                self._loop.post(report)
                continue
            origin = Origin(machine=session.machine, agent=session.agent, seq=number)
            self._loop.post(
                Incoming(report, then=partial(self._journalled, session, number), origin=origin)
            )

    def _session_of(self, connection: Connection) -> _Session | None:
        for session in self._sessions.values():
            if session.connection is connection:
                return session
        return None

    def _welcome(self, connection: Connection, hello: wire.Hello) -> None:
        session = self._sessions.get(hello.machine)
        if session is not None and session.connection is connection:
            return  # the Hello came twice
        if session is None or session.agent != hello.agent:
            journalled = self._received.get((hello.machine, hello.agent), 0)
            former = session.connection if session is not None else None
            session = _Session(hello.machine, hello.agent, journalled)
            self._sessions[hello.machine] = session
        else:
            former = session.connection
        session.connection = connection
        if former is not None:
            former.close()
        term = self._journal.term
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL,
            version=VERSION,
            term=term,
            received=session.journalled,
            policy=self._ground.options.spec.policy,
        )
        received = hello.received if hello.term == term else 0
        connection.send(self, welcome)
        for frame in session.link.resume(received, self._ground.schedule.now):
            connection.send(self, frame)

    def _journalled(self, session: _Session, number: int) -> None:
        session.journalled = number
        session.link.delivered(number)
        self._acknowledge(session)

    def _acknowledge(self, session: _Session) -> None:
        acknowledgement = session.link.ack_due()
        if acknowledgement is not None and session.connection is not None:
            session.connection.send(self, acknowledgement)

    def _look(self) -> None:
        """Also for a higher term: a controller that hears nothing would never find out."""
        if self._ground.ledger.term > self._journal.term:
            self.die()
        if not self.alive:
            return
        for session in self._sessions.values():
            if session.connection is not None:
                for frame in session.link.due(self._ground.schedule.now):
                    session.connection.send(self, frame)
                self._acknowledge(session)
        self._ground.schedule.after(LOOK_S, self._look)

    def closed(self, connection: Connection) -> None:
        """The connection is gone: the machine is silent, unless it has a newer one."""
        session = self._session_of(connection)
        if session is not None:
            session.connection = None
            session.link.disconnected()
            self.post(MachineSilent(machine=session.machine, agent=session.agent))


def _show(value: Value) -> str:
    """All fields but the long ones."""
    fields = {name: getattr(value, name) for name in value.__struct_fields__ if name != "id"}
    shown = [f"{name}={field}" for name, field in fields.items() if len(str(field)) < LONG]
    return f"{type(value).__name__} {' '.join(shown)}"
