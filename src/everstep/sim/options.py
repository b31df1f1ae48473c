"""One run's conditions, all drawn from its seed: swarm testing.

Every run leaves out some kinds of faults and exaggerates others, and shakes every number that the
policies decide by, so that 200 runs meet combinations that nobody would write down. Liveness is
promised for numbers that make sense together, so some are drawn within bounds that the comments
give.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random

from msgspec.structs import replace

from everstep.model import (
    CheckpointSpec,
    CodeSpec,
    ElasticSpec,
    Every,
    Generation,
    GroupShape,
    JobId,
    JobSpec,
    LayoutSpec,
    PolicySpec,
    RankPhase,
    Seconds,
    SeenGroups,
    Value,
    VersionId,
)
from everstep.sim.code import Flaw
from everstep.sim.hanging import Pause

SLOWNESS = 3.0
MANY = 1000
"""Recoveries that no run comes to: the guard against loops is off."""


class Harm(StrEnum):
    """What may go wrong. The names are those of nemesis.py's methods."""

    KILL_RANK = "kill_rank"
    FAIL_RANK = "fail_rank"
    KILL_AGENT = "kill_agent"
    KILL_LAUNCHER = "kill_launcher"
    LOSE_MACHINE = "lose_machine"
    REBOOT = "reboot"
    CUT_OFF = "cut_off"
    KILL_CONTROLLER = "kill_controller"
    RIVAL_CONTROLLER = "rival_controller"
    POWER_FAILURE = "power_failure"
    ASK_FOR_FAULT = "ask_for_fault"
    STICK = "stick"
    BREAK_LAUNCHER = "break_launcher"
    FILL_DISK = "fill_disk"
    VOLUNTEER = "volunteer"
    ASK_TO_STOP = "ask_to_stop"
    ISOLATE = "isolate"
    ALERT = "alert"
    ALERT_MANY = "alert_many"
    FLAP = "flap"
    UPDATE = "update"
    UPDATE_TWICE = "update_twice"
    ROLLBACK = "rollback"
    HANG = "hang"
    SEVER = "sever"
    FALL_MUTE = "fall_mute"
    SLOW_DOWN = "slow_down"
    SICKEN = "sicken"
    ASK_FOR_STACKS = "ask_for_stacks"


class Script(StrEnum):
    """What the user's script is like."""

    TRAINS = "trains"
    """It reports steps and saves every one of them."""
    UNATTACHED = "unattached"
    """It trains, but never imports everstep."""
    RAISES = "raises"
    """Every rank raises an exception before its first step."""
    QUITS_EARLY = "quits_early"
    """Rank 0 ends with exit code 0 while the others still need it."""


class Network(Value, frozen=True, kw_only=True):
    """How frames travel while faults are allowed; later only `latency_s` remains."""

    latency_s: Seconds
    loss: float
    """Share of frames that vanish. TCP loses none while it stands: this is harsher."""
    doubled: float
    reordered: bool
    """Whether frames may overtake each other."""
    noticed_s: Seconds
    """How long it takes to notice that a silent peer is gone (pings)."""


class Options(Value, frozen=True, kw_only=True):
    """Everything about a run that is not chance at the moment itself."""

    seed: int
    spec: JobSpec
    network: Network
    script: Script
    steps: int
    """Length of the training."""
    step_s: Seconds
    save_s: Seconds
    jitter: float
    """Relative spread of the ranks' times."""
    slow: float
    """Share of machines that need SLOWNESS times as long for everything."""
    disk_s: Seconds
    transfer_s: Seconds
    """A shard's way from machine to machine."""
    replica_stride: int
    """Ranks so far apart hold something alike, and each sends its slice of it to its peer: 1 is
    DDP, 2 is tensor parallelism of two. 0: nobody does."""
    replicas_differ: bool
    """They do not: the script broke one. Nothing may ever be joined of their slices."""
    look_s: Seconds
    """Between two looks of an agent at its ranks' heartbeats."""
    harms: tuple[Harm, ...]
    harm_every_s: Seconds
    safety_s: Seconds
    """How long faults are allowed; then all is healed, and the job must end well."""
    away_s: Seconds
    """How long at most a killed controller stays away."""
    killed_in_turn: float
    """Chance that a controller dies at one of the points inside its turn."""
    hang: float
    """Share of ranks that wait for ever when a peer is gone, instead of failing."""
    witnessed: float
    """Share of lost machines that the cluster notices by itself."""
    released: float
    """Share of evicted machines that the cluster takes away at once."""
    refused: float
    """Share of requests for machines that the cluster refuses."""
    snapshot_every: int
    hosts_again: float
    """Share of new machines whose host was here before, if there is such a one."""
    kernel_of: int
    """So many machines are stand-ins on one kernel."""
    flaws: tuple[Flaw, ...]
    """What versions that are sent may have."""
    crash_after: float
    """Steps that a version does on average which crashes now and then."""
    not_held: float
    """Share of orders to get a version that fail."""
    untold: float
    """Share of trials of a version that come to nothing."""
    pauses: tuple[Pause, ...]
    """What its script does now and then that takes longer than a step."""
    recorded: bool
    """torch's flight recorder is on."""
    groups: tuple[SeenGroups, ...]
    """What the ranks of one generation after the other tell of their parallel groups."""

    def groups_of(self, generation: Generation) -> SeenGroups:
        return self.groups[generation % len(self.groups)]


def draw(seed: int) -> Options:
    """The options of this seed."""
    rng = Random(seed)  # noqa: S311 -- a seed that is printed, not a secret
    nnodes, nproc = rng.choice([(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
    step_s = rng.choice([0.1, 0.5, 1.0, 2.0])
    steps = rng.randint(30, 120)
    more = Random(f"backups of {seed}")  # noqa: S311 -- older seeds stay as they were otherwise
    later = Random(f"local disks of {seed}")  # noqa: S311 -- the same
    spec = _elastic(seed, _spec(seed, rng, more, later, (nnodes, nproc)))
    script = _script(rng)
    checks = Random(f"checks of {seed}")  # noqa: S311 -- the same
    updates = Random(f"updates of {seed}")  # noqa: S311 -- the same
    hangs = Random(f"hangs of {seed}")  # noqa: S311 -- the same
    harms = _harms(rng, later, checks, updates, hangs)
    return Options(
        seed=seed,
        spec=spec,
        network=_network(rng),
        script=script,
        steps=steps,
        step_s=step_s,
        save_s=step_s * rng.choice([0.05, 0.5, 0.95]),
        jitter=rng.choice([0.01, 0.3]),
        slow=rng.choice([0.0, 0.0, 0.3]),
        disk_s=rng.choice([0.05, 1.0, 5.0]),
        transfer_s=more.choice([0.05, 1.0, 4.0]),
        replica_stride=Random(f"replicas of {seed}").choice([0, 1, 1, 2]),  # noqa: S311
        replicas_differ=Random(f"equality of {seed}").random() < 0.2,  # noqa: S311
        look_s=rng.choice([0.3, 1.0]),
        harms=harms,
        harm_every_s=rng.choice([2.0, 5.0, 15.0]),
        safety_s=rng.uniform(0.2, 1.0) * steps * step_s + 10.0,
        away_s=rng.choice([3.0, 3.0, 60.0]),
        killed_in_turn=rng.choice([0.0, 0.0, 0.01, 0.05]),
        # Ranks that wait for ever for one that ended well are not this step's matter.
        hang=0.0 if script is Script.QUITS_EARLY else rng.choice([0.0, 0.5, 1.0]),
        witnessed=rng.choice([0.0, 0.7, 1.0]),
        released=rng.choice([0.0, 0.5, 1.0]),
        refused=rng.choice([0.0, 0.5]),
        snapshot_every=rng.choice([3, 20, 1000]),
        hosts_again=Random(f"hosts of {seed}").choice([0.0, 0.5]),  # noqa: S311
        kernel_of=checks.choice([1, 1, 2, 100]),
        flaws=_flaws(updates, script),
        crash_after=updates.choice([3.0, 30.0]),
        not_held=updates.choice([0.0, 0.0, 0.3]),
        untold=updates.choice([0.0, 0.0, 0.3]),
        pauses=_pauses(hangs, step_s),
        recorded=hangs.random() < 0.5,
        groups=_groups(more, nnodes * nproc),
    )


def _elastic(seed: int, spec: JobSpec) -> JobSpec:
    """Some jobs may go on with fewer replicas. Drawn by itself: older seeds stay as they were."""
    dice = Random(f"elasticity of {seed}")  # noqa: S311 -- the same
    if spec.nnodes == 1 or dice.random() < 0.6:
        return spec
    pipelines = LayoutSpec(pp=2, dp=spec.world_size // 2) if spec.world_size % 2 == 0 else None
    tensors = LayoutSpec(tp=2, dp=spec.world_size // 2) if spec.nproc_per_node == 2 else None
    elastic = replace(
        spec,
        layout=dice.choice([None, pipelines, tensors]),
        policy=replace(spec.policy, elastic_after_s=dice.choice([5.0, 20.0, 600.0])),
    )
    smaller = [size for size in range(1, elastic.dp) if elastic.dp > 1]
    if not smaller:
        return spec
    sharded = dice.random() < 0.3
    return replace(elastic, elastic=ElasticSpec(dp_min=dice.choice(smaller), sharded=sharded))


def _spec(seed: int, rng: Random, more: Random, later: Random, sizes: tuple[int, int]) -> JobSpec:
    nnodes, nproc = sizes
    return JobSpec(
        job=JobId("sim"),
        uid="00000000",
        command=("train.py",),
        working_dir="/",
        nnodes=nnodes,
        nproc_per_node=nproc,
        standbys=rng.choice([0, 0, 1, 2]),
        checkpoint=CheckpointSpec(
            directory="/checkpoints",
            local_directory="/local",
            local_disk_every=later.choice([Every(), Every(steps=7), Every(seconds=5.0)]),
            disk_every=Every(steps=rng.choice([0, 5, 10, 20])),
            keep=rng.choice([2, 2, 3]),
            backup=more.random() < 0.7,
            backup_every=more.choice([1, 3, 10]),
        ),
        policy=_looks(
            _updating(_policy(rng, Random(f"quarantine of {seed}")), seed),  # noqa: S311
            seed,
        ),
        code=_code(seed),
    )


def _harms(
    rng: Random, later: Random, checks: Random, updates: Random, hangs: Random
) -> tuple[Harm, ...]:
    chances = (
        (_COMMON, rng, 0.4),
        (_RARE, rng, 0.15),
        (_LATER, later, 0.3),
        (_CHECKS, checks, 0.3),
        (_UPDATES, updates, 0.3),
        (_HANGS, hangs, 0.2),
    )
    return tuple(
        harm for harms, dice, chance in chances for harm in harms if dice.random() < chance
    )


def _flaws(rng: Random, script: Script) -> tuple[Flaw, ...]:
    """A script that reports no steps and crashes for ever is ended by the guard that is off."""
    flaws = tuple(flaw for flaw in Flaw if rng.random() < 0.5)
    left_out = (Flaw.CRASHES, Flaw.STRAYS) if script is Script.UNATTACHED else ()
    return tuple(flaw for flaw in flaws if flaw not in left_out)


def _script(rng: Random) -> Script:
    others = [Script.UNATTACHED, Script.RAISES, Script.QUITS_EARLY]
    return rng.choice(others) if rng.random() < 0.15 else Script.TRAINS


def _groups(rng: Random, world: int) -> tuple[SeenGroups, ...]:
    """Mostly the same for all generations, so that backups stay where they are."""
    inner = [size for size in range(2, world) if world % size == 0]
    choices = [SeenGroups()]
    for size in inner:
        grid = (
            GroupShape(name="dp", factors=((1, size),)),
            GroupShape(name="pp", factors=((size, world // size),)),
        )
        choices += [SeenGroups(groups=grid), SeenGroups(mesh=grid, groups=grid[:1])]
    one = rng.choice(choices)
    return tuple(rng.choices(choices, k=3)) if rng.random() < 0.2 else (one,)


_COMMON = (
    Harm.KILL_RANK,
    Harm.FAIL_RANK,
    Harm.KILL_AGENT,
    Harm.KILL_LAUNCHER,
    Harm.LOSE_MACHINE,
    Harm.CUT_OFF,
    Harm.KILL_CONTROLLER,
    Harm.ASK_FOR_FAULT,
)
_RARE = (
    Harm.RIVAL_CONTROLLER,
    Harm.POWER_FAILURE,
    Harm.STICK,
    Harm.BREAK_LAUNCHER,
    Harm.FILL_DISK,
    Harm.VOLUNTEER,
    Harm.ASK_TO_STOP,
)
_LATER = (Harm.REBOOT,)
_CHECKS = (Harm.ISOLATE, Harm.ALERT, Harm.ALERT_MANY, Harm.FLAP)
_UPDATES = (Harm.UPDATE, Harm.UPDATE_TWICE, Harm.ROLLBACK)
_HANGS = (
    Harm.HANG,
    Harm.SEVER,
    Harm.FALL_MUTE,
    Harm.SLOW_DOWN,
    Harm.SICKEN,
    Harm.ASK_FOR_STACKS,
)
"""Drawn by themselves, so that older seeds stay as they were otherwise."""


def _pauses(rng: Random, step_s: Seconds) -> tuple[Pause, ...]:
    """Evaluation, checkpoints of the script's own, a compiler before the first step."""
    chosen = (
        (RankPhase.EVALUATING, rng.choice([20, 50])),
        (RankPhase.SAVING, rng.choice([15, 40])),
        (RankPhase.COMPILING, 0),
    )
    return tuple(
        Pause(
            phase=phase,
            every=every,
            takes_s=rng.choice([5.0 * step_s, 15.0, 60.0]),
            declared=rng.random() < 0.5,
            alone=every > 0 and rng.random() < 0.3,
        )
        for phase, every in chosen
        if rng.random() < 0.2
    )


def _looks(policy: PolicySpec, seed: int) -> PolicySpec:
    """What hangs are noticed and looked into by."""
    rng = Random(f"patience with hangs of {seed}")  # noqa: S311 -- the same
    return replace(
        policy,
        stall_min_s=rng.choice([3.0, 10.0]),
        stall_max_s=rng.choice([40.0, 90.0]),
        quiet_s=rng.choice([20.0, 60.0]),
        # Longer than agents take to come back.
        look_within_s=rng.choice([10.0, 30.0]),
        # Longer than it takes to hear of a step.
        look_again_s=rng.choice([2.0, 4.0]),
        look_retry_s=rng.choice([2.0, 10.0]),
        looks_max=rng.choice([2, 5]),
        slow_every_s=rng.choice([3.0, 10.0]),
    )


def _policy(rng: Random, quarantine: Random) -> PolicySpec:
    """Every number shaken. Faults come so fast here that the guard against loops is mostly off."""
    return PolicySpec(
        agent_return_s=rng.choice([1.0, 5.0, 8.0]),
        silent_s=rng.choice([6.0, 20.0, 60.0]),
        gone_within_s=rng.choice([3.0, 10.0]),
        # Longer than a launcher takes to come back, else every start fails.
        start_within_s=rng.choice([12.0, 60.0]),
        recoveries_max=rng.choice([3, MANY, MANY, MANY]),
        recoveries_window_s=rng.choice([100.0, 1800.0]),
        proven_after_steps=rng.choice([1, 10]),
        # Longer than a script takes to its first step, else one that always raises before it
        # counts as proven, and is restarted again and again.
        proven_after_s=rng.choice([30.0, 60.0]),
        settle_s=rng.choice([0.0, 2.0]),
        gather_s=rng.choice([0.0, 3.0]),
        early_exit_s=rng.choice([5.0, 60.0]),
        end_within_s=rng.choice([5.0, 30.0]),
        stop_grace_s=rng.choice([0.0, 5.0]),
        lease_s=rng.choice([15.0, 120.0]),
        retest_after_s=quarantine.choice([2.0, 20.0, 600.0]),
        test_within_s=quarantine.choice([2.0, 60.0]),
        evictions_max=quarantine.choice([1, 3, MANY]),
    )


def _updating(policy: PolicySpec, seed: int) -> PolicySpec:
    """What other code is decided by."""
    rng = Random(f"patience with updates of {seed}")  # noqa: S311 -- the same
    return replace(
        policy,
        fails_again_s=rng.choice([60.0, 1800.0]),
        rollbacks_max=rng.choice([1, 2, 2, 4]),
        ran_well_steps=rng.choice([5, 20]),
        ran_well_s=rng.choice([30.0, 1800.0]),
        hold_within_s=rng.choice([10.0, 120.0]),
        try_within_s=rng.choice([5.0, 60.0]),
        save_before_stop_s=rng.choice([0.0, 1.0, 10.0]),
    )


def _code(seed: int) -> CodeSpec:
    """Mostly versioned."""
    rng = Random(f"first version of {seed}")  # noqa: S311 -- the same
    if rng.random() < 0.1:
        return CodeSpec(why_none="its directory has too many files")
    return CodeSpec(version=VersionId(f"{rng.getrandbits(256):064x}"), roots=("/code",))


def _network(rng: Random) -> Network:
    lossy = rng.random() < 0.3
    return Network(
        latency_s=rng.choice([0.001, 0.05, 0.3]),
        loss=rng.choice([0.02, 0.2]) if lossy else 0.0,
        doubled=rng.choice([0.02, 0.2]) if lossy else 0.0,
        reordered=lossy and rng.random() < 0.5,
        noticed_s=rng.choice([1.0, 10.0]),
    )
