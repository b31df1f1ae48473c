"""Everything the core can ask for: imperatives, frozen, in one tagged union.

`ControllerAction` is what the controller's core decides, and therefore exactly what the journal
holds beside each event. `Order` is the part of it that is sent to one machine. (What the core of
an agent asks of its own shell is in core/agent_io.py.)

Every action has an id (idempotent: a shell that sees an id twice acts once and answers twice), a
cause (the journal number of the event that led to it) and a sentence that says why, with numbers.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.model import (
    NO_STEP,
    Fault,
    Generation,
    MachineId,
    NodeRank,
    Peer,
    Rank,
    Seconds,
    Step,
    Value,
)


class Imperative(Value, frozen=True, kw_only=True, tag=True):
    """Base of all actions; the class name is the tag on the wire and in the journal."""

    id: str
    cause: str
    """Id of what led to it: the journal number of an event ("412"), or of an order ("412.0")."""
    why: str


# --- orders: sent to one machine, answered by an event that names the id -------------------------


class StopRanks(Imperative, frozen=True, kw_only=True):
    """End every rank older than `generation`, prove it gone, reserve a store port.

    Answered by RanksStopped or RanksSurvived. A machine with nothing running answers at once.
    """

    machine: MachineId
    generation: Generation
    grace_s: Seconds = 0.0
    """Time between SIGTERM and SIGKILL. 0: SIGKILL at once, right for a restart, since the
    checkpoint lies in shared memory and a broken process group cannot finish a step anyway."""
    within_s: Seconds = 10.0


class StartRanks(Imperative, frozen=True, kw_only=True):
    """Fork this machine's ranks of this generation. Answered by RanksStarted or StartFailed."""

    machine: MachineId
    generation: Generation
    node_rank: NodeRank
    master_addr: str
    master_port: int
    restore: Step
    """Step to restore, NO_STEP for none. Slots of newer steps are dropped before the fork."""
    restore_generation: Generation
    """Generation that computed `restore`."""
    fetch: tuple[Peer, ...] = ()
    """Where to fetch the shards of `restore` from that are not in this machine's memory; what can
    be fetched from nobody is read from disk."""
    slices: tuple[Peer, ...] = ()
    """Where each rank's slices are, of those that parts in `fetch` are joined with: in the memory
    of its own machine or of its peer. Of whole shards alone: empty."""
    restarts: int
    """Restarts before this one, torchrun's TORCHELASTIC_RESTART_COUNT."""


class PersistStep(Imperative, frozen=True, kw_only=True):
    """Keep this step's slot until it is on disk. Answered by StepPersisted or PersistFailed."""

    machine: MachineId
    generation: Generation
    """The generation that computes this step: a copy of another one is not the copy meant."""
    step: Step
    local_disk: bool = False
    """True: on the machine's own disk, for its own ranks. False: where all machines read it."""
    safe: Step = NO_STEP
    """For the local disk: the newest step that lies on the local disks of all machines. It is kept
    beside the new one, and nothing else is."""


class BackUpStep(Imperative, frozen=True, kw_only=True):
    """Keep this step's slots, and send them to the peers. Answered by StepBackedUp or BackupFailed.

    The step is the same for the whole job. `safe`, the step before it that all peers hold, stays
    kept as well until this one is complete everywhere.
    """

    machine: MachineId
    generation: Generation
    """The generation that computes this step."""
    step: Step
    safe: Step
    """NO_STEP if there is none yet."""
    peers: tuple[Peer, ...]
    """One for every rank of the machine."""
    spread_s: Seconds = 0.0
    """Time over which to spread the sending; 0: as fast as it goes."""
    whole: str = ""
    """Why shards are sent whole; empty: of what ranks hold alike, each sends its slice."""


class ProbeMachine(Imperative, frozen=True, kw_only=True):
    """Try to reach a machine whose agent is silent. Answered by MachineProbed.

    A second path: whether the machine is gone, or only its agent's connection to the controller.
    """

    machine: MachineId
    """Who tries."""
    target: MachineId
    address: str
    port: int
    """Any port does: to be refused is an answer, too."""
    within_s: Seconds
    attempt: int
    """Counted from 1 for each silence."""


class InjectFault(Imperative, frozen=True, kw_only=True):
    """Break something on purpose. Answered by FaultInjected, just before it happens."""

    fault: Fault
    machine: MachineId | None = None
    """None: the controller itself."""
    rank: Rank | None = None


class ReleaseMachine(Imperative, frozen=True, kw_only=True):
    """End everything of ours on the machine. Answered by MachineReleased, its last word."""

    machine: MachineId


Order = (
    StopRanks | StartRanks | PersistStep | BackUpStep | ProbeMachine | InjectFault | ReleaseMachine
)


# --- decisions the controller's own shell carries out --------------------------------------------


class EvictMachine(Imperative, frozen=True, kw_only=True):
    """The machine leaves the job and is refused from now on; whoever owns it may take it away."""

    machine: MachineId
    accused: bool = False
    """Something speaks against it: a check, what its ranks printed. False: it is lost."""
    unit: str = ""
    """It goes as a part of this: "switch:leaf7", "boot 5f3a". Empty: by itself."""


class WakeStandby(Imperative, frozen=True, kw_only=True):
    """The standby takes this position. It is an entry in the books: its orders follow."""

    machine: MachineId
    node_rank: NodeRank


class RequestMachines(Imperative, frozen=True, kw_only=True):
    """Ask the owner of machines for this many more. Answered by MachinesRequested."""

    count: int


class PublishStep(Imperative, frozen=True, kw_only=True):
    """All shards of this step are on disk: write its manifest. Answered by StepPublished."""

    step: Step
    generation: Generation


class BeginGeneration(Imperative, frozen=True, kw_only=True):
    """A new incarnation of all training processes: everything older is void from here on."""

    generation: Generation


class OpenIncident(Imperative, frozen=True, kw_only=True):
    """A symptom that no open incident explains. Viewers are told."""

    incident: str
    symptom: str


class CloseIncident(Imperative, frozen=True, kw_only=True):
    """The incident's recovery is proven, or the job ended with it. Viewers are told."""

    incident: str


class PageHuman(Imperative, frozen=True, kw_only=True):
    """Nothing is left to try that is not a guess: tell a person, with the whole story in `why`."""

    about: str
    """Key of the matter: one page per matter and generation."""


class Outcome(StrEnum):
    """How a job ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class FinishJob(Imperative, frozen=True, kw_only=True):
    """The job ends; machines are released next. `why` is the sentence shown to its user."""

    outcome: Outcome
    exit_code: int
    detail: str = ""
    """For example the traceback of the rank that failed."""


class EndController(Imperative, frozen=True, kw_only=True):
    """Nothing is left to do: write the result and go."""


Decision = (
    EvictMachine
    | WakeStandby
    | RequestMachines
    | PublishStep
    | BeginGeneration
    | OpenIncident
    | CloseIncident
    | PageHuman
    | FinishJob
    | EndController
)

ControllerAction = Order | Decision

DURABLE = (
    BeginGeneration,
    StartRanks,
    BackUpStep,
    PublishStep,
    EvictMachine,
    RequestMachines,
    FinishJob,
    EndController,
)
"""Actions before which the journal is fsynced: what must never be decided twice differently. (With
BackUpStep, ranks and peers let go of the step that was machine-safe before.)"""
