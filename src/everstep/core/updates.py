"""Code versions: what is pending, who holds it, what runs, what ran well.

observe.py and commit.py have facts and decisions noted here; rules.py asks for what to do:

    hold_versions    every machine gets what runs, what is pending and what may be rolled back to,
                     one from the other
    try_pending      one machine imports a new version before anything is stopped for it
    restart_for      why ranks that run are stopped for other code, if they are
    put_in_place     with the ranks stopped, the next generation gets the newest one that is ready

An urgent update is put in place when all machines are ready; a lazy one rides on the next restart.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import (
    ControllerAction,
    HoldVersion,
    RefuseUpdate,
    SwitchCode,
    TryVersion,
)
from everstep.core.deciding import Deciding, Planned
from everstep.core.state import State
from everstep.events import (
    LossesCompared,
    RollbackRequested,
    UpdateRequested,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.model import Seconds, Step, Value, VersionId


class Target(Value, frozen=True, kw_only=True):
    """The version to roll back to, or why there is none."""

    version: VersionId | None
    why: str


# --- taking note ---------------------------------------------------------------------------------


def job_came(state: State, now: Seconds) -> None:
    """The code that the job was submitted with is the first version."""


def update_requested(state: State, event: UpdateRequested, now: Seconds) -> None:
    """One more version."""


def rollback_requested(state: State, event: RollbackRequested, now: Seconds) -> None:
    """A person wants an earlier one."""


def version_held(state: State, event: VersionHeld, now: Seconds) -> None:
    """One more machine has it."""


def version_not_held(state: State, event: VersionNotHeld, now: Seconds) -> None:
    """One machine could not get it."""


def version_tried(state: State, event: VersionTried, now: Seconds) -> None:
    """It was imported once, or could not be."""


def losses_compared(state: State, event: LossesCompared, now: Seconds) -> None:
    """What came of the steps that were done again."""


def steps_done(state: State, count: Step | int, now: Seconds) -> None:
    """So many new steps were finished by all ranks, under the version that runs."""


def switch_code(state: State, action: SwitchCode, now: Seconds) -> None:
    """The next generation runs it."""


def refuse_update(state: State, action: RefuseUpdate, now: Seconds) -> None:
    """It never runs."""


def hold_version(state: State, action: HoldVersion, now: Seconds) -> None:
    """A machine was told to get it."""


def try_version(state: State, action: TryVersion, now: Seconds) -> None:
    """A machine was told to try it."""


# --- deciding ------------------------------------------------------------------------------------


def hold_versions(d: Deciding) -> list[ControllerAction]:
    """Bring what is wanted to those who lack it."""
    del d
    return []


def try_pending(d: Deciding) -> list[ControllerAction]:
    """Have it imported; refuse what does not import."""
    del d
    return []


def restart_for(d: Deciding) -> Planned | None:
    """Ranks that run are stopped for other code now; None: they are not."""
    del d
    return None


def put_in_place(d: Deciding) -> list[ControllerAction]:
    """Ranks are stopped, and a newer version is ready: the next generation runs it."""
    del d
    return []


def code_is_missing(state: State) -> bool:
    """Whether a member cannot run yet what the next generation runs."""
    del state
    return False


def rollback_target(state: State, now: Seconds) -> Target:
    """What the ladder may roll back to. Not too often in one incident."""
    del state, now
    return Target(version=None, why="there is no earlier version of the code")


def deadlines(state: State) -> Iterator[Seconds]:
    """When a rule of this file may have something to decide."""
    del state
    yield from ()
