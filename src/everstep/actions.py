"""Everything the core can ask for: imperatives, frozen, in one tagged union.

`ControllerAction` is what the controller's core decides, and therefore exactly what the journal
holds beside each event. `Order` is the part of it that is sent to one machine. (What the core of
an agent asks of its own shell is in core/agent_io.py.)

Every action has an id (idempotent: a shell that sees an id twice acts once and answers twice), a
cause (the journal number of the event that led to it) and a sentence that says why, with numbers.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.looks import Fingerprint, LookResult, Purpose
from everstep.model import (
    NO_STEP,
    NO_VERSION,
    AgentAt,
    Fault,
    Generation,
    MachineId,
    NodeRank,
    Peer,
    Rank,
    Seconds,
    Step,
    Value,
    VersionId,
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
    saved_within_s: Seconds = 0.0
    """Wait at most so long for the step that each rank has finished to be saved. 0: do not wait."""


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
    version: VersionId = NO_VERSION
    """The code to run."""
    nnodes: int = 0
    """Machines of this generation; 0: as many as the job was submitted with."""
    dp: int = 0
    """Data-parallel replicas of this generation; 0: as nnodes."""
    restore_nnodes: int = 0
    """Machines of the generation that computed `restore`, if they were not as many as now; else 0.
    Without `restores` the step is then loaded by way of torch's own format."""
    restores: tuple[tuple[Rank, Rank], ...] = ()
    """For ranks of this machine that go on with another rank's shard: themselves, and that one. It
    is the one that `fetch` and `slices` name."""
    compare_through: Step = NO_STEP
    """Compare the losses of the steps up to this one with those of when they were done before, and
    say what came of it (LossesCompared). NO_STEP: do not."""


class HoldVersion(Imperative, frozen=True, kw_only=True):
    """Get this code version, so that ranks could run it. Answered by VersionHeld or VersionNotHeld.

    From one of `sources`, else from the controller.
    """

    machine: MachineId
    version: VersionId
    sources: tuple[AgentAt, ...] = ()
    keep: tuple[VersionId, ...] = ()
    """What may still be asked for; all others may be dropped."""
    within_s: Seconds


class TryVersion(Imperative, frozen=True, kw_only=True):
    """Import what the script of this version imports, in a process of its own.

    Answered by VersionTried. The script's own lines below its imports are not run.
    """

    machine: MachineId
    version: VersionId
    within_s: Seconds
    beside_ranks: bool = False
    """Ranks run there: the trial sees no GPU and has the lowest priority."""


class TestMachine(Imperative, frozen=True, kw_only=True):
    """Test the machine, on which no rank runs. Answered by MachineTested."""

    __test__ = False  # for pytest: this is no test

    machine: MachineId
    attempt: int
    """Counted from 1 for each eviction."""
    within_s: Seconds


class CollectStacks(Imperative, frozen=True, kw_only=True):
    """Take the stacks of all ranks here and of their children, and say what they show.

    Answered by MachineStacks. It pauses nothing that runs, unless `native` says so.
    """

    machine: MachineId
    generation: Generation
    look: int
    """Number of the look, counted from 1 in each job."""
    within_s: Seconds
    purpose: Purpose = Purpose.HANG
    neighbours: tuple[AgentAt, ...] = ()
    """Other machines of the job: whether they can be reached from here is said, too."""
    native: bool = True
    """Also frames below Python, of ranks that show no wait. That pauses those for a moment."""


class SendStacks(Imperative, frozen=True, kw_only=True):
    """Send the text of these stacks, which an answer to CollectStacks named. Answer: StacksSent."""

    machine: MachineId
    look: int
    stacks: tuple[Fingerprint, ...]


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
    StopRanks
    | StartRanks
    | PersistStep
    | BackUpStep
    | ProbeMachine
    | HoldVersion
    | TryVersion
    | TestMachine
    | CollectStacks
    | SendStacks
    | InjectFault
    | ReleaseMachine
)


# --- decisions the controller's own shell carries out --------------------------------------------


class Rung(StrEnum):
    """One step of the escalation ladder; core/ladder.py says in which order they are taken."""

    EVICT = "evict"
    """Machines that something speaks against go, standbys take their positions."""
    EVICT_AGGREGATED = "evict after aggregate"
    """Machines that the stacks of all ranks set apart go: of a holder, or of a parallel group."""
    EVICT_TESTED = "evict after tests"
    """Machines that failed a test go."""
    EVICT_REPLAYED = "evict after replay"
    """Machines whose results were others go."""
    HOT_UPDATE = "hot update"
    """A person sent other code."""
    RESIZE = "resize"
    """The number of machines changes."""
    RERUN = "rerun"
    """The same steps again on the same machines: the same bits, or others?"""
    AGGREGATE = "aggregate"
    """The stacks of all ranks are compared."""
    TEST = "test"
    """All machines are tested while nothing runs."""
    REATTEMPT = "reattempt"
    """Start again and change nothing."""
    ROLLBACK = "rollback"
    """Start again with code that ran well before."""
    REPLAY = "replay"
    """Groups of machines repeat the same steps, and their results are compared."""
    HUMAN = "human"
    """Nothing is left to try."""


class EvictMachine(Imperative, frozen=True, kw_only=True):
    """The machine leaves its position, and is refused until it has passed its tests twice."""

    machine: MachineId
    accused: bool = False
    """Something speaks against it: a check, what its ranks printed. False: it is lost."""
    unit: str = ""
    """It goes as a part of this: "switch:leaf7", "boot 5f3a". Empty: by itself."""


class ReturnMachine(Imperative, frozen=True, kw_only=True):
    """An evicted machine has passed its tests: it is a standby again."""

    machine: MachineId


class GiveVerdict(Imperative, frozen=True, kw_only=True):
    """What became known of a machine that was evicted."""

    machine: MachineId
    guilty: bool


class WakeStandby(Imperative, frozen=True, kw_only=True):
    """The standby takes this position. It is an entry in the books: its orders follow."""

    machine: MachineId
    node_rank: NodeRank


class ResizeJob(Imperative, frozen=True, kw_only=True):
    """From the generation that begins on, the job has so many machines and replicas."""

    nnodes: int
    dp: int
    positions: tuple[tuple[NodeRank, MachineId], ...]
    """Of the machines that go on. Others that had one are standbys."""


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
    planned: Rung | None = None
    """What ranks that were well are stopped for; None: something failed, or nothing ran."""


class OpenIncident(Imperative, frozen=True, kw_only=True):
    """A symptom that no open incident explains. Viewers are told."""

    incident: str
    symptom: str
    planned: bool = False
    """Nothing failed: ranks are stopped for other code, or for machines that came."""


class CloseIncident(Imperative, frozen=True, kw_only=True):
    """The incident's recovery is proven, or the job ended with it. Viewers are told."""

    incident: str


class TakeRung(Imperative, frozen=True, kw_only=True):
    """What this recovery does about the open incident."""

    incident: str
    rung: Rung
    failure: str
    """Class of the failure: the same one again climbs."""


class JudgeStacks(Imperative, frozen=True, kw_only=True):
    """What a look showed, in one word and one sentence."""

    look: int
    result: LookResult
    machines: tuple[MachineId, ...] = ()
    """Whom it names."""
    ranks: tuple[Rank, ...] = ()
    """Of which ranks that is known."""
    group: str = ""
    """The parallel group that they are: "pp 24-31". Empty: each by itself. Of a round of looks at
    slow training, all groups that it flags, with semicolons."""


class SwitchCode(Imperative, frozen=True, kw_only=True):
    """From the next generation on, this code version runs."""

    version: VersionId
    previous: VersionId
    rolled_back: bool = False
    """It is an earlier one, since `previous` did not do well, or a person wants it."""


class RefuseUpdate(Imperative, frozen=True, kw_only=True):
    """The version is not put in place. Viewers are told."""

    version: VersionId
    detail: str = ""
    """The traceback of its import, say."""


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
    | ReturnMachine
    | GiveVerdict
    | TakeRung
    | JudgeStacks
    | SwitchCode
    | RefuseUpdate
    | WakeStandby
    | ResizeJob
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
    SwitchCode,
    ResizeJob,
    RequestMachines,
    FinishJob,
    EndController,
)
"""Actions before which the journal is fsynced: what must never be decided twice differently. (With
BackUpStep, ranks and peers let go of the step that was machine-safe before.)"""
