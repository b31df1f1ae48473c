"""The nouns of everstep: ids, units, the job's specification, and the root of all errors.

Every other module imports this one and this one imports nothing of ours. The words are those of
the glossary in ARCHITECTURE.md and, for ranks and groups, those of torch.distributed. Nothing here
reads a clock, a file or the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, NewType

import msgspec
from msgspec.structs import replace

JobId = NewType("JobId", str)
MachineId = NewType("MachineId", str)
Rank = NewType("Rank", int)
NodeRank = NewType("NodeRank", int)
"""A machine's position in the job, torchrun's GROUP_RANK: it owns ranks node_rank*nproc.. ."""
Term = NewType("Term", int)
Generation = NewType("Generation", int)
Step = NewType("Step", int)
VersionId = NewType("VersionId", str)
"""A code version: the SHA-256, in hex, of all that is in it (code/manifest.py)."""
Seconds = float
"""Durations and points in time of the core, in seconds. One clock: the controller's."""

NO_STEP = Step(-1)
"""The step before the first: what a job restores that has no checkpoint yet."""
NO_GENERATION = Generation(0)
NO_VERSION = VersionId("")
"""The code as it lies on each machine: of a program that is no Python, or too large to be kept."""


class EverstepError(Exception):
    """Root of every error that everstep raises on purpose.

    Its message is one clear sentence that says what happened, with values, and what to do; the
    command line prints exactly that and exits with `exit_code`.
    """

    exit_code = 1


class UserError(EverstepError):
    """What the user asked for cannot be done as asked: a flag, a path, a size is wrong."""

    exit_code = 2


class RankPhase(StrEnum):
    """What a rank does, as far as it said so: some things take longer than a step."""

    STARTING = "starting"
    TRAINING = "training"
    RESTORING = "restoring"
    EVALUATING = "evaluating"
    SAVING = "saving"
    """A checkpoint of the script's own."""
    COMPILING = "compiling"
    ENDED = "ended"


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of every immutable record. Unknown fields are ignored: a peer may be one version on."""


class Fact(Value, frozen=True, kw_only=True, tag=True):
    """Base of all events (events.py); the class name is the tag on the wire and in the journal."""


class Every(Value, frozen=True, kw_only=True):
    """How often something is done: by steps or by time, never by both. Neither: never."""

    steps: int = 0
    seconds: Seconds = 0.0

    @property
    def never(self) -> bool:
        return not self.steps and not self.seconds

    def __str__(self) -> str:
        return f"every {self.steps} steps" if self.steps else f"every {self.seconds:g} s"


class CheckpointSpec(Value, frozen=True, kw_only=True):
    """How often steps are copied out of memory, and to where."""

    directory: str
    """Absolute path, or a URL for fsspec. On several hosts it must lie where all reach it."""
    disk_every: Every = Every(steps=100)
    """Between two copies there: what the loss of an owner with its peer may cost."""
    local_directory: str = ""
    """Absolute path on each machine's own disk, where its own shards are copied to as well; empty:
    nowhere."""
    local_disk_every: Every = Every(seconds=600.0)
    """Between two copies there: what may be lost when all memory is, at once. By default rarely:
    each copy writes all state of a machine, and the cells of a disk wear out."""
    backup: bool = True
    """Keep every shard in the memory of a second machine too (jobs of one machine have none)."""
    backup_every: int = 10
    """Fewest steps between two backup steps; they bound what the loss of a machine costs. A backup
    that takes longer than that makes the next one later, never the trainer."""
    backup_bytes_per_s: float = 0.0
    """Most bytes per second that one machine sends for backups; 0: no such limit. Without it, a
    backup is spread over a part of the time until the next one (core/keeping.py)."""
    backup_interface: str = ""
    """Network interface of each machine that backups go over, for example "ib0"; empty: the one of
    the machine's address. Training needs the other one for itself."""
    keep: int = 2
    """Published steps kept on disk. Two at least: a torn newest one leaves a whole older one, and
    what the controller restores is still there while the next one is being published."""


class PolicySpec(Value, frozen=True, kw_only=True):
    """Every number that the first policies decide by. Tests and the simulator shake them."""

    agent_return_s: Seconds = 5.0
    """Silence of a machine that is needed for a restart before it counts as lost. A keeper brings a
    killed agent back in well under a second; a network blip of TCP takes one to three."""
    silent_s: Seconds = 60.0
    """Silence of a machine while nothing advances before it counts as lost although no rank failed
    While the job's steps advance, its agent is waited for without limit."""
    gone_within_s: Seconds = 10.0
    """Time a machine gets to prove its old ranks gone before it is evicted."""
    start_within_s: Seconds = 60.0
    """Time from the order to fork ranks to the report that they run, cold launcher included."""
    fetch_within_s: Seconds = 300.0
    """Time added to that for a machine that fetches shards from peers: 300 GB at 1 GB/s."""
    recoveries_max: int = 3
    recoveries_window_s: Seconds = 1800.0
    """At most 3 recoveries in 30 minutes without progress, then a human."""
    proven_after_steps: int = 10
    """A restart is proven by this many further finished steps."""
    proven_after_s: Seconds = 60.0
    """The same for scripts that report no steps: this long without a failure."""
    settle_s: Seconds = 2.0
    """Before the job's first step, time to hear of the other ranks' ends after a rank ended with a
    Python exception: an error of the user is told from its echoes on other ranks by all of them."""
    gather_s: Seconds = 3.0
    """Once enough machines are there to start, time to wait for the rest, so that positions are
    given in the order of machine names and not of arrival."""
    early_exit_s: Seconds = 60.0
    """Patience with ranks that still run after another rank of the job exited with 0."""
    end_within_s: Seconds = 30.0
    """At the end of a job, time for each of: stopping ranks, the last disk copy, releasing
    machines. What has not answered by then is left to `everstep clean`."""
    stop_grace_s: Seconds = 5.0
    """Between SIGTERM and SIGKILL when a person stops the job: user code may want to save."""
    lease_s: Seconds = 120.0
    """An agent without controller and without progress stops its ranks after this."""
    strikes_within_s: Seconds = 300.0
    """Two occurrences of what is tolerated once (a link that went down, say) within this time evict
    a machine: links heal, but not those that go down again (ByteRobust, 4.1)."""
    strikes_apart_s: Seconds = 20.0
    """Two occurrences closer than this are one: a cable that is pulled shows on several items, and
    they are looked at up to this much apart."""
    strikes_together_s: Seconds = 3.0
    """Before ranks are stopped for a second occurrence, time for other machines to say the same: a
    switch that fails takes the links of all its machines, and each looks once a second."""
    slowed: float = 1.25
    """A step that takes so many times the usual is a slow one: that is 80 % of the speed, as
    diagnosis.abnormal.Limits has it."""
    slowed_within_s: Seconds = 300.0
    """What counts only together with falling throughput counts when that began no longer ago."""
    alert_counts_s: Seconds = 300.0
    """So long after it was over, an alert still weighs when something fails: the crash that follows
    a fault may take minutes (NCCL's time-out), and a device that came back did not come back well.
    """
    accusers_within_s: Seconds = 300.0
    """Machines accused within this time count together."""
    accused_max: int = 2
    accused_share: float = 0.1
    """More machines accused at once than the larger of this number and this share of the job are
    not the machines: a storage, a driver, the code. Nobody is evicted for it."""
    common_cause_s: Seconds = 10.0
    """An accusation that names a cause which others may share (a storage, a driver) waits so long
    for theirs before ranks are stopped for it: as long as most checks take to look again."""
    probe_after_s: Seconds = 2.0
    """Silence of a machine before others are asked to reach it: a killed agent is back by then."""
    probe_idle_s: Seconds = 5.0
    probe_idle_steps: float = 3.0
    """Others are asked only if nothing advanced for the longer of this time and so many steps:
    while training advances, a silent agent is nobody's harm."""
    probe_within_s: Seconds = 3.0
    """Time for one try: TCP sends its first packet again after one second and after three."""
    probe_again_s: Seconds = 5.0
    """Others are asked again no sooner: an answer that did not come is given up then, and one that
    the machine can be reached holds until then."""
    fails_again_s: Seconds = 1800.0
    """A failure of the same class so soon after a restart is the same one again, although steps
    were done in between: the ladder goes on where it stood, as far as a rollback."""
    rollbacks_max: int = 2
    """Rollbacks of one incident: each drops what came with one version."""
    recent_code_s: Seconds = 86400.0
    """A version that has run for longer is not what broke: it is not rolled back."""
    ran_well_steps: int = 100
    ran_well_s: Seconds = 1800.0
    """A version that did so many steps, or ran for so long, between two failures is one to roll
    back to."""
    update_within_s: Seconds = 86400.0
    """A lazy update that no restart came for is put in place after this (ByteRobust, 6.1)."""
    hold_within_s: Seconds = 120.0
    """Time for one machine to fetch one code version."""
    try_within_s: Seconds = 60.0
    """Time for the import of a new version. One that takes longer was not tried to its end, which
    says nothing against it."""
    save_before_stop_s: Seconds = 10.0
    """Before ranks are stopped for something planned, time for the step that they just finished to
    be saved."""
    retest_after_s: Seconds = 600.0
    """Between two tests of an evicted machine: what comes and goes shall have time to come."""
    test_within_s: Seconds = 300.0
    """Time for one test of an evicted machine."""
    evictions_max: int = 3
    evictions_window_s: Seconds = 30 * 86400.0
    """A machine that was evicted so often within this time is out for good."""
    elastic_after_s: Seconds = 600.0
    """A job that may go on with fewer replicas waits so long for machines before it does."""
    looks: bool = True
    """False: nothing is looked into by itself, neither stalls nor slow training; looks that people
    ask for still work."""
    stall_min_s: Seconds = 10.0
    stall_factor: float = 3.0
    """No step for the longer of this time and so many times the recent 99th percentile of the time
    per step is a stall: the stacks of all ranks are looked at, which costs training nothing."""
    stall_max_s: Seconds = 600.0
    """Most patience, also in phases that are known to be long (ByteRobust, 4.1: ten minutes without
    traffic), and the patience where nothing is known yet: a first step, a first evaluation."""
    quiet_s: Seconds = 60.0
    """The same for scripts that report no steps: so long without output, and without processor time
    or traffic, of any rank."""
    look_within_s: Seconds = 30.0
    """Time for one look at all stacks; a machine that has not answered by then counts as
    one that holds up the others."""
    look_again_s: Seconds = 2.0
    """Between two looks at a stall: what is the same in both stands still."""
    look_retry_s: Seconds = 10.0
    looks_max: int = 5
    """A stall of which looks tell nothing is looked at so often, this far apart."""
    slow_every_s: Seconds = 10.0
    slow_rounds: int = 5
    slow_flags: int = 3
    """Training that became slower is looked at so often, this far apart; the group that is flagged
    in so many rounds at least, and most, goes (ByteRobust, 5.1)."""


class CodeSpec(Value, frozen=True, kw_only=True):
    """The user's code when the job was submitted."""

    version: VersionId = NO_VERSION
    roots: tuple[str, ...] = ()
    """Absolute directories whose content is versioned: the one that Python puts in front of its
    sys.path, and those that --source-root names. In a version they are numbered in this order."""
    why_none: str = ""
    """Why the code is not versioned, if it is not."""
    files: int = 0
    size_bytes: int = 0
    """Of the version. None of one that an older everstep kept."""


class CodeOrigin(Value, frozen=True, kw_only=True):
    """Where the files of a version lay: what is sent from there again, continues it."""

    kind: str = ""
    """ "dir" or "git"; empty: unknown."""
    path: str = ""
    host: str = ""
    commit: str = ""
    """Of a git commit, or of the one that a directory has checked out: all 40 digits."""


class CodeVersion(Value, frozen=True, kw_only=True):
    """What people are told of one code version."""

    version: VersionId
    source: str
    """Where it was taken from: "/home/anna/gpt on login1", "git 1a2b3c4 of /home/anna/gpt"."""
    files: int = 0
    size_bytes: int = 0
    base: VersionId = NO_VERSION
    """The version that it changes."""
    sent: VersionId = NO_VERSION
    """What its author sent, if this is that with the changes of others merged into it."""
    includes: tuple[VersionId, ...] = ()
    """Versions that never ran by themselves and whose changes are in it."""
    changed: tuple[str, ...] = ()
    """Files that differ from `base`; the first 100."""
    requirements: tuple[str, ...] = ()
    """Files among them that say what has to be installed."""
    remarks: tuple[str, ...] = ()
    """Sentences that its author was told when it was accepted."""
    origin: CodeOrigin = CodeOrigin()


class ElasticSpec(Value, frozen=True, kw_only=True):
    """The job may go on with fewer data-parallel replicas when machines are missing."""

    dp_min: int = 1
    """Fewest replicas that are worth training with."""
    sharded: bool = False
    """The state differs between replicas (FSDP, ZeRO): it is loaded by way of torch's own format.
    """


CheckLimits = dict[str, dict[str, Any]]
"""Check -> limit -> value; its type is the check's own. Some are lists, or tables of verdicts."""


class ChecksSpec(Value, frozen=True, kw_only=True):
    """What agents check while ranks train, and how strictly."""

    on: bool = True
    limits: CheckLimits = {}
    """Check -> limit -> value, where a site wants another one than the check's own."""
    metrics_port: int = 0
    """Where each agent shows its results to Prometheus, on its machine's address; 0: nowhere."""
    node_socket: str = "/run/everstep/node.sock"
    """Where the node service listens, if there is one (`everstep check --serve`)."""


class LayoutSpec(Value, frozen=True, kw_only=True):
    """Sizes of the parallel dimensions, as --layout or job.toml says; core/groups.py computes."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    """Dimensions from the one that varies fastest with the rank to the slowest (Megatron-LM's)."""


class GroupShape(Value, frozen=True, kw_only=True, array_like=True):
    """What the parallel groups of one kind have in common: their members, apart from the first."""

    name: str
    """As it was given: of a dimension of a mesh or of a process group. Empty if it had none."""
    factors: tuple[tuple[int, int], ...]
    """(stride, size), the fastest first: members are a first rank and stride * 0 .. size - 1 more,
    for each factor. No two factors share a rank but the first, and a group is aligned: its first
    rank divided by the stride is a multiple of the size."""


class SeenGroups(Value, frozen=True, kw_only=True):
    """The parallel groups that ranks of one generation have, each kind once, however many ranks."""

    mesh: tuple[GroupShape, ...] = ()
    """The dimensions of the mesh that the script gave to everstep.attach(), if it gave one."""
    mesh_problem: str = ""
    """Why nothing can be read off that mesh; empty if it can, or if there is none."""
    groups: tuple[GroupShape, ...] = ()
    """Of the process groups of torch.distributed."""
    odd: tuple[str, ...] = ()
    """Names of process groups whose members have no shape."""


class JobSpec(Value, frozen=True, kw_only=True):
    """What one job is: written once, when it is submitted, as the first record of its journal."""

    job: JobId
    uid: str
    """Eight hex digits, fresh for every submission: part of the shared-memory names."""
    command: tuple[str, ...]
    """The script and its arguments; with `module` the module name comes first."""
    module: bool = False
    """True: `python -m NAME`, torchrun's --module."""
    no_python: bool = False
    """True: the command is a program of its own, torchrun's --no-python; it is exec'ed."""
    no_fork: bool = False
    """True: start every rank in a fresh interpreter instead of forking the warm launcher."""
    preload: tuple[str, ...] = ()
    """Installed packages that the launcher imports besides torch."""
    working_dir: str
    nnodes: int
    nproc_per_node: int
    standbys: int = 0
    auto_standbys: bool = False
    """True: `standbys` is the least; how many are kept follows the job's own history
    (core/standby.py)."""
    local: bool = False
    """True: machines are stand-ins on this host, started by cluster/local.py."""
    env: dict[str, str] = {}
    """Variables set for every rank on top of the environment that its machine has."""
    checkpoint: CheckpointSpec
    policy: PolicySpec = PolicySpec()
    checks: ChecksSpec = ChecksSpec()
    layout: LayoutSpec | None = None
    """None: nothing is known of parallel groups; then only the loss of one machine is provided
    for, not that of a group."""
    code: CodeSpec = CodeSpec()
    elastic: ElasticSpec | None = None
    """None: the job waits for all its machines."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def backs_up(self) -> bool:
        """Whether shards are also kept in the memory of a second machine."""
        return self.checkpoint.backup and self.nnodes > 1

    @property
    def dp(self) -> int:
        """Data-parallel replicas; with no layout stated, every rank is one."""
        return self.layout.dp if self.layout is not None else self.world_size

    def resized(self, nnodes: int, dp: int) -> JobSpec:
        """The same job on another number of machines, with another number of replicas."""
        layout = None if self.layout is None else replace(self.layout, dp=dp)
        return replace(self, nnodes=nnodes, layout=layout)

    def ranks_of(self, node_rank: NodeRank) -> range:
        """The global ranks of the machine at this position, in local-rank order."""
        first = node_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node)


class Span(Value, frozen=True, kw_only=True, array_like=True):
    """Ranks at equal distances, as those of one group are: a few bytes, however many they are."""

    first: Rank
    count: int
    stride: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count * self.stride, self.stride)


def spans_of(ranks: Iterable[Rank]) -> tuple[Span, ...]:
    """The same ranks in few spans; equal for equal sets."""
    found: list[Span] = []
    for rank in sorted(ranks):
        last = found[-1] if found else None
        if last is not None and last.count == 1:
            found[-1] = Span(first=last.first, count=2, stride=rank - last.first)
        elif last is not None and rank == last.first + last.count * last.stride:
            found[-1] = Span(first=last.first, count=last.count + 1, stride=last.stride)
        else:
            found.append(Span(first=rank, count=1, stride=1))
    return tuple(found)


def ranks_in(spans: Iterable[Span]) -> Iterator[Rank]:
    """All ranks of these spans."""
    return (Rank(rank) for span in spans for rank in span.ranks)


class Copy(Value, frozen=True, kw_only=True, array_like=True):
    """One rank's complete checkpoint of one step in the memory of the machine that reports it.

    `generation` is the one that computed the step. Shards belong together only if it is equal on
    every rank: the same step computed twice need not have the same bits.
    """

    rank: Rank
    step: Step
    generation: Generation
    replicas: tuple[Span, ...] = ()
    """Empty if the copy is whole. Else it is a part: of what these ranks (its own among them) hold
    alike it has only its own slice, and the shard is joined with what the others have."""


class Replicated(Value, frozen=True, kw_only=True, array_like=True):
    """What one rank has of the tensors that it believes to hold in common with some others."""

    rank: Rank
    replicas: tuple[Span, ...]
    """All of them, this one too."""
    digest: str
    """Of the tensors' checksums: equal on all, if they are replicas indeed."""


class Peer(Value, frozen=True, kw_only=True, array_like=True):
    """Where the shards of one rank are sent to, or fetched from: another machine's agent."""

    rank: Rank
    machine: MachineId
    address: str
    port: int
    """Of the agent's shard server."""


class AgentAt(Value, frozen=True, kw_only=True, array_like=True):
    """How another machine's agent is reached."""

    machine: MachineId
    address: str
    port: int
    """Of its shard server, which gives code as well."""


class Published(Value, frozen=True, kw_only=True, array_like=True):
    """A step of which every rank's shard is on disk under one manifest."""

    step: Step
    generation: Generation


class ExitStatus(Value, frozen=True, kw_only=True):
    """How a process ended, as wait(2) tells it: exactly one of the two is not None.

    Both None: the process is gone and nobody reaped it (its keeper died too).
    """

    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal}"
        return "an unknown status" if self.code is None else f"exit code {self.code}"


class RankError(Value, frozen=True, kw_only=True):
    """What a dying rank said: torch's error file or the launcher's own record of the exception."""

    kind: str
    """Name of the exception class, for example "ImportError"."""
    message: str
    traceback: str
    """At most 16 KiB; the innermost part is kept."""


class Fault(StrEnum):
    """What `everstep inject` can do to a job."""

    KILL_RANK = "kill-rank"
    KILL_LAUNCHER = "kill-launcher"
    KILL_AGENT = "kill-agent"
    LOSE_MACHINE = "lose-machine"
    KILL_CONTROLLER = "kill-controller"


class RankStatus(Value, frozen=True, kw_only=True):
    """One rank as its agent sees it at the moment of a report."""

    rank: Rank
    generation: Generation
    pid: int
    exit: ExitStatus | None = None
    """None while it runs."""
