"""What the agent's core is told and what it asks for: the vocabulary of core/agent.py.

The shell in agent/ and the simulator's machines create these events and carry out these actions.
Nothing here crosses a machine's border; what does is Report (events.py) and Order (actions.py).
"""

from __future__ import annotations

from everstep.actions import (
    BackUpStep,
    CollectStacks,
    HoldVersion,
    Imperative,
    InjectFault,
    Order,
    PersistStep,
    ProbeMachine,
    SendStacks,
    StartRanks,
    TestMachine,
    TryVersion,
)
from everstep.diagnosis.findings import Finding
from everstep.events import (
    AlertCleared,
    AlertRaised,
    BackupFailed,
    FaultInjected,
    MachineProbed,
    MachineTested,
    PersistFailed,
    RankExited,
    Report,
    StepBackedUp,
    StepPersisted,
    TimerFired,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.model import (
    NO_STEP,
    Copy,
    Fact,
    Generation,
    Rank,
    RankPhase,
    RankStatus,
    Seconds,
    SeenGroups,
    Step,
    Term,
)
from everstep.sightings import (
    BadNumber,
    Computes,
    LossesCompared,
    MachineStacks,
    Numbers,
    StacksSent,
)

# --- events --------------------------------------------------------------------------------------


class OrderReceived(Fact, frozen=True, kw_only=True):
    """The controller of this term ordered something of this machine."""

    term: Term
    order: Order


class ControllerConnected(Fact, frozen=True, kw_only=True):
    """A connection to a controller of this term stands."""

    term: Term


class ControllerDisconnected(Fact, frozen=True, kw_only=True):
    """The connection to the controller is gone."""


class RanksAdopted(Fact, frozen=True, kw_only=True):
    """First fact an agent's core hears: what the heartbeat slots say was left running here."""

    generation: Generation
    ranks: tuple[RankStatus, ...]


class RanksForked(Fact, frozen=True, kw_only=True):
    """The launcher forked the ranks. Answer to ForkRanks."""

    action: str
    generation: Generation
    ranks: tuple[RankStatus, ...]


class ForkFailed(Fact, frozen=True, kw_only=True):
    """The launcher could not fork the ranks, or there is no launcher."""

    action: str
    generation: Generation
    reason: str


class RanksGone(Fact, frozen=True, kw_only=True):
    """No process of an older generation is left here. Answer to KillRanks."""

    action: str
    generation: Generation
    store_port: int
    copies: tuple[Copy, ...] = ()
    backups: tuple[Copy, ...] = ()
    local_disk: tuple[Copy, ...] = ()
    finished: Step = NO_STEP
    finished_age_s: Seconds = 0.0


class RanksRemain(Fact, frozen=True, kw_only=True):
    """Killed processes would not go in time (uninterruptible sleep, say), or keep a GPU."""

    action: str
    generation: Generation
    pids: tuple[int, ...]
    reason: str = ""
    """One clause; empty: these processes are still there. With it there may be no pids."""


class SlotsRead(Fact, frozen=True, kw_only=True):
    """What the heartbeat slots of this machine's running ranks say right now."""

    generation: Generation
    slowest: Step
    fastest: Step
    step_s: Seconds | None = None
    loss: float | None = None
    attached: bool = False
    """A rank here said that it will tell of its steps."""
    phase: RankPhase = RankPhase.TRAINING
    phase_s: Seconds = 0.0
    computes: tuple[Computes, ...] = ()


class NumbersRead(Fact, frozen=True, kw_only=True):
    """What one rank of this machine reported since the last look, in its slot or its log."""

    generation: Generation
    rank: Rank | None = None
    logged: bool = False
    numbers: tuple[Numbers, ...] = ()
    bad: BadNumber | None = None
    differs: BadNumber | None = None


class ActivityRead(Fact, frozen=True, kw_only=True):
    """Whether the ranks of this machine do anything right now, once a second."""

    generation: Generation
    quiet_s: Seconds
    """As in MachineActivity; 0: they do something."""
    no_traffic_s: Seconds | None = None
    idle_s: Seconds | None = None


class FindingsRead(Fact, frozen=True, kw_only=True):
    """What the output of ranks here shows for the first time."""

    generation: Generation
    findings: tuple[Finding, ...]


class ChecksRead(Fact, frozen=True, kw_only=True):
    """What the monitor of this machine has to say since it last said something."""

    said: tuple[AlertRaised | AlertCleared, ...]


class GroupsRead(Fact, frozen=True, kw_only=True):
    """What all ranks of this machine wrote about their parallel groups, folded."""

    generation: Generation
    seen: SeenGroups


Told = (
    StepPersisted
    | PersistFailed
    | StepBackedUp
    | BackupFailed
    | MachineProbed
    | MachineTested
    | VersionHeld
    | VersionNotHeld
    | VersionTried
    | MachineStacks
    | StacksSent
    | FaultInjected
)
"""What the shell says of an order is the answer to it, word for word."""

AgentEvent = (
    OrderReceived
    | ControllerConnected
    | ControllerDisconnected
    | RanksAdopted
    | RanksForked
    | ForkFailed
    | RanksGone
    | RanksRemain
    | RankExited
    | SlotsRead
    | NumbersRead
    | ActivityRead
    | FindingsRead
    | ChecksRead
    | GroupsRead
    | LossesCompared
    | Told
    | TimerFired
)


# --- actions -------------------------------------------------------------------------------------


class ForkRanks(Imperative, frozen=True, kw_only=True):
    """Fetch what the order says, drop newer slots, then have the launcher fork."""

    order: StartRanks


class KillRanks(Imperative, frozen=True, kw_only=True):
    """Kill what is older than `generation`, prove it gone: RanksGone or RanksRemain."""

    generation: Generation
    grace_s: Seconds
    within_s: Seconds
    saved_within_s: Seconds = 0.0
    """Before that, wait at most so long for what ranks have finished to be saved."""


class PersistShards(Imperative, frozen=True, kw_only=True):
    """Pin this step on every local rank and copy it to disk: StepPersisted or PersistFailed."""

    order: PersistStep


class BackUpShards(Imperative, frozen=True, kw_only=True):
    """Keep the order's steps, send the new one: StepBackedUp or BackupFailed."""

    order: BackUpStep


class DoProbe(Imperative, frozen=True, kw_only=True):
    """Try to reach what the order names: MachineProbed."""

    order: ProbeMachine


class FetchVersion(Imperative, frozen=True, kw_only=True):
    """Get the order's code version into this machine's store: VersionHeld or VersionNotHeld."""

    order: HoldVersion


class TryImports(Imperative, frozen=True, kw_only=True):
    """Have a fork of the launcher import what the script imports: VersionTried."""

    order: TryVersion


class DoTest(Imperative, frozen=True, kw_only=True):
    """Test this machine: MachineTested."""

    order: TestMachine


class TakeStacks(Imperative, frozen=True, kw_only=True):
    """Look at all processes of ranks here: MachineStacks."""

    order: CollectStacks


class GiveStacks(Imperative, frozen=True, kw_only=True):
    """Give the text of stacks that were taken: StacksSent."""

    order: SendStacks


class DoFault(Imperative, frozen=True, kw_only=True):
    """Kill what the order names."""

    order: InjectFault


class LeaveMachine(Imperative, frozen=True, kw_only=True):
    """Report MachineReleased, then end launcher, ranks, keeper and this agent."""


class SendReport(Imperative, frozen=True, kw_only=True):
    """Say this to the controller, now or when there is one again."""

    report: Report


AgentAction = (
    ForkRanks
    | KillRanks
    | PersistShards
    | BackUpShards
    | DoProbe
    | FetchVersion
    | TryImports
    | DoTest
    | TakeStacks
    | GiveStacks
    | DoFault
    | LeaveMachine
    | SendReport
)
