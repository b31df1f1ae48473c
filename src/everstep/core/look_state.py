"""What the core knows of looks at stacks, of stalls and of slow training: a part of State.

Plain data like all of state.py. looking.py, stalls.py and slowness.py change it.
"""

from __future__ import annotations

import msgspec

from everstep.diagnosis.standing import Peer
from everstep.looks import Cluster, Fingerprint, LookResult, Purpose, Stack, Stood
from everstep.model import NO_GENERATION, Generation, MachineId, Rank, RankPhase, Seconds, Step


class Look(msgspec.Struct, kw_only=True):
    """One look at all stacks: what was asked, what came, what was concluded."""

    number: int
    purpose: Purpose
    why: str
    """What led to it, as a clause."""
    generation: Generation
    round: int = 1
    """Of the looks at the same stall or slow-down, counted from 1."""
    asked_at: Seconds
    awaiting: dict[MachineId, str] = {}
    """Machines that owe their answer -> id of the order."""
    asked: list[MachineId] = []
    """All that were asked."""
    silent: list[MachineId] = []
    """Those that did not answer in time, or have no connection."""
    clusters: list[Cluster] = []
    stood: list[Stood] = []
    peers: list[Peer] = []
    unreached: list[tuple[MachineId, MachineId]] = []
    remarks: list[str] = []
    fetching: dict[Fingerprint, str] = {}
    """Stacks whose text is on its way -> id of the order."""
    fetched_at: Seconds = 0.0
    """When the newest of those were asked for."""
    stacks: dict[Fingerprint, Stack] = {}
    untold: list[Fingerprint] = []
    """Stacks whose text nobody has any more."""
    taken_at: Seconds | None = None
    """When the last answer came, or was given up."""
    result: LookResult | None = None
    """None: it is not judged yet."""
    judged_at: Seconds = 0.0
    event: int = 0
    """Number of the event at which it was judged."""
    verdict: str = ""
    """The sentence that says why."""
    machines: list[MachineId] = []
    outliers: list[MachineId] = []
    """Those of them that `ranks` are on: what goes if all are too many."""
    ranks: list[Rank] = []
    group: str = ""


class Watching(msgspec.Struct, kw_only=True):
    """A stall or a slow-down that is being looked into, from its first look to its end."""

    purpose: Purpose
    incident: str = ""
    since: Seconds
    """When nothing advanced any more, or training became slower."""
    noticed_at: Seconds
    step: Step
    """Finished by all, when it was noticed."""
    phase: RankPhase = RankPhase.TRAINING
    """What ranks said that they do, then."""
    quiet: bool = False
    """It is a script without steps that does nothing any more."""
    looks: list[Look] = []
    """Those of this matter, oldest first; of the older ones little is kept."""
    next_at: Seconds | None = None
    """When to look again; None: a look is under way, or it is over."""
    flags: dict[str, int] = {}
    """Of slow training: parallel groups -> rounds in which they were flagged."""


class Took(msgspec.Struct, frozen=True, array_like=True):
    """How long something took that ended well, and when that was."""

    seconds: Seconds
    at: Seconds


class Patience(msgspec.Struct, kw_only=True):
    """How long things take in this job: what a stall is measured by."""

    steps: list[Seconds] = []
    """Times per step, recent ones."""
    longest: dict[RankPhase, list[Took]] = {}
    """How long phases took that ended well, the longest of the recent ones."""
    went_on: list[Took] = []
    """Pauses that were looked at and ended by themselves."""
    told_at: Seconds = 0.0
    """When the newest report of progress came, whatever it said."""
    heard_at: Seconds = 0.0
    """When a member was heard of again that had been silent."""
    attached: Generation = NO_GENERATION
    """The newest in which ranks told of steps, or would tell of them."""
    phase: RankPhase = RankPhase.TRAINING
    phase_since: Seconds = 0.0
    """When it began, or the long one before it was over."""
    quiet_s: Seconds = 0.0
    """For how long the job was quiet when that was told last, and when that was."""
    quiet_at: Seconds = 0.0
    no_traffic_s: Seconds | None = None
    quiet_before: list[Took] = []
    """How long it was quiet before, and then went on."""


class Straggler(msgspec.Struct, kw_only=True, frozen=True):
    """A rank that holds up all others."""

    rank: Rank
    machine: MachineId
    at: Seconds
    event: int
    why: str
    costs: float
