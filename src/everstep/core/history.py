"""Records that a job keeps for as long as it lives: code versions, evictions, sizes.

Parts of State (state.py): changed by versions.py, quarantine.py and resize.py alone.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.model import CodeVersion, Generation, MachineId, Seconds, Step
from everstep.sightings import LossesCompared


class Condition(StrEnum):
    """What became of a code version."""

    PENDING = "pending"
    """It is being brought to the machines, and tried."""
    READY = "ready"
    """It waits for a restart."""
    RUNNING = "running"
    RAN = "ran"
    """Another one has taken its place."""
    ROLLED_BACK = "rolled back"
    REFUSED = "refused"
    INCLUDED = "included"
    """Its changes are in a newer one that was put in place instead."""


class Ran(msgspec.Struct, kw_only=True):
    """One time that a version ran, from one switch to the next."""

    since: Seconds
    until: Seconds | None = None
    from_step: Step
    """The newest step that was finished before."""
    steps: int = 0
    """New steps that it did."""
    well: bool = False
    """It did enough steps, or ran for long enough, between two failures."""
    stretch: int = 0
    """New steps since ranks were started last."""
    longest_s: Seconds = 0.0
    """The longest time that it is known to have run between two failures."""


class VersionBook(msgspec.Struct, kw_only=True):
    """What is known of one code version."""

    code: CodeVersion
    number: int
    """What people call it: 1 for v1."""
    by: str
    note: str = ""
    at: Seconds
    event: int
    """Journal number of the request."""
    urgent: bool = False
    due_at: Seconds = 0.0
    """When it is put in place although nothing failed; meaningful while it is not urgent."""
    overlap: int = 0
    untried: bool = False
    """Nobody need have imported it."""
    condition: Condition = Condition.PENDING
    why: str = ""
    """Why it is refused or was rolled back."""
    detail: str = ""
    tried: bool = False
    """It was imported."""
    trials: int = 0
    """Orders to try it so far."""
    trial: str = ""
    """Id of the newest of them."""
    trial_at: Seconds = 0.0
    """When it was given."""
    tried_on: dict[MachineId, int] = {}
    """Where to."""
    untold: list[str] = []
    """Trials of which nothing could be told, with the reason."""
    problem: str = ""
    """Why it does not import."""
    elsewhere: tuple[str, ...] = ()
    """Files that it imports and that are not versioned."""
    asked: dict[MachineId, Seconds] = {}
    """Machines that have not got it yet: when they were told to, or last failed."""
    not_held: dict[MachineId, int] = {}
    """How often a machine said that it could not get it, or did not answer."""
    reasons: dict[MachineId, str] = {}
    """Why, the last time."""
    runs: list[Ran] = []
    compared: dict[MachineId, LossesCompared] = {}
    """What machines said of the losses of steps that were done again under it."""
    repeats: str = ""
    """Whether losses came out as before when steps were done again under it, as a sentence."""
    to_tell: str = ""
    """What people have yet to be told about that."""


class Sized(msgspec.Struct, kw_only=True, frozen=True):
    """From when on the job had so many machines, and so many data-parallel replicas."""

    since: Generation
    nnodes: int
    dp: int


class Eviction(msgspec.Struct, kw_only=True):
    """One eviction, and what became known of the machine since."""

    machine: MachineId
    host: str
    """What is blocked: a machine that comes back may have another name."""
    at: Seconds
    action: str
    why: str
    accused: bool
    member: bool
    """It had a position."""
    unit: str = ""
    incident: str = ""
    back_as: MachineId = MachineId("")
    """Name under which its host came back; empty: it did not, or under its own."""
    quarantined: bool = False
    """It is looked into: whoever owns it leaves it where it is."""
    asked: str = ""
    """Id of the newest order to stop its ranks or to test it."""
    asked_at: Seconds = 0.0
    tests: int = 0
    """Orders to test it so far."""
    passed: int = 0
    """Tests that it passed."""
    untold: int = 0
    """Tests of which nothing came."""
    failed: str = ""
    """What it failed at, as a clause."""
    told: str = ""
    """What the newest test told, as a clause."""
    tested_at: Seconds = 0.0
    """When it did."""
    guilty: bool | None = None
    """None: not known yet, or never."""
    verdict: str = ""
    """Why, as a sentence."""
    returned: bool = False
    """It is back in the job."""
