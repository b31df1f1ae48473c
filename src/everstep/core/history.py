"""Records that a job keeps for as long as it lives: its code versions and its evictions.

Parts of State (state.py): changed by updates.py and quarantine.py alone.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.model import CodeVersion, MachineId, Seconds, Step


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
    trials: int = 0
    """Orders to try it so far."""
    elsewhere: tuple[str, ...] = ()
    """Files that it imports and that are not versioned."""
    not_held: dict[MachineId, int] = {}
    """How often a machine said that it could not get it."""
    runs: list[Ran] = []
    repeats: str = ""
    """Whether losses came out as before when steps were done again under it, as a sentence."""


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
    tests: int = 0
    """Orders to test it so far."""
    passed: int = 0
    """Tests that it passed, one after the other."""
    tested_at: Seconds = 0.0
    guilty: bool | None = None
    """None: not known yet, or never."""
    verdict: str = ""
    """Why, as a sentence."""
    returned: bool = False
    """It is back in the job."""
