"""Follows a code version from its acceptance until it runs: one line for each stage.

For `everstep update` and `rollback`. It only looks: whoever ends it ends nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from everstep.actions import Rung
from everstep.commands import jobs
from everstep.commands.client import Away, Client
from everstep.commands.presses import Presses
from everstep.controller.version_views import VersionsView, VersionView
from everstep.controller.views import IncidentView, StatusView
from everstep.core.ettr import Owner
from everstep.core.history import Condition
from everstep.core.state import Phase
from everstep.model import EverstepError, Generation, VersionId

POLL_S = 0.2
NO_STEPS_S = 10.0
"""A script that reports no step by then may never report one."""
LEFT = 130
"""Exit code after Ctrl-C, as a shell has it."""
_LOST = (Owner.DETECTING, Owner.LOCATING, Owner.WAITING, Owner.RESTARTING)
_OVER = (Condition.REFUSED, Condition.ROLLED_BACK)
Tell = Callable[[str], None]


class Ending(NamedTuple):
    """How following ended."""

    exit_code: int
    version: VersionView | None
    """As it was then."""


class Follower:
    """Tells of one version."""

    def __init__(
        self, client: Client, presses: Presses, tell: Tell, *, known: bool = False
    ) -> None:
        """`known`: the version has run before, so nobody imports it to try."""
        self._client = client
        self._presses = presses
        self._tell = tell
        self._known = known
        self._told: set[str] = {"tried"} if known else set()
        self._away = False
        self._runs_since: float | None = None

    def follow(self, version: VersionId, before: Generation, *, lazy: bool) -> Ending:
        """Until it runs in a generation after `before`; until it is ready if it is lazy.

        Exit code 1 if it never will.
        """
        last: VersionView | None = None
        while not self._presses.count:
            try:
                known, status = self._client.versions(), self._client.status()
            except Away as away:
                if self._is_away(away):
                    return Ending(1, last)
            else:
                self._away = False
                last = next((v for v in known.versions if v.version == version), None)
                code = self._stage(known, last, status, before, lazy=lazy)
                if code is not None:
                    return Ending(code, last)
            time.sleep(POLL_S)
        self._tell("left alone: the update goes on; `everstep versions` shows what becomes of it")
        return Ending(LEFT, last)

    def _is_away(self, away: Away) -> bool:
        """Whether nobody comes back."""
        job = self._client.job
        result = jobs.result_of(job)
        if result is not None:
            complain(f"the job is over ({result.outcome}): {result.why}")
        elif not job.root.exists():
            complain(f"job {job.root.name} is gone: its directory {job.root} was removed")
        elif not self._away:
            self._tell(f"{away} The update goes on when it is back: waiting for it")
        self._away = True
        return result is not None or not job.root.exists()

    # --- stages ---

    def _stage(
        self,
        known: VersionsView,
        view: VersionView | None,
        status: StatusView,
        before: Generation,
        *,
        lazy: bool,
    ) -> int | None:
        """Tell what is new; the exit code once nothing more is to come."""
        if view is None:
            return self._over(status)
        if view.condition in _OVER and not self._known:
            failure = f"{view.failure}; " if view.failure else ""
            complain(f"{view.name} is {view.condition}: {failure}{view.why}", view.detail)
            return 1
        if status.generation <= before or view.condition is not Condition.RUNNING:
            self._tell_of_machines(known, view)
        self._tell_of_trial(view)
        if view.condition is Condition.INCLUDED:
            self._tell(f"{view.name} is in a newer version, which was put in place instead")
            return 0
        if view.condition is Condition.READY and lazy:
            self._tell(f"{view.name} is ready: the next restart brings it, or {_due(view)}")
            return 0
        if status.generation > before:
            self._once("stop", f"generation {before} stops at step {status.furthest}")
        if view.condition is Condition.RUNNING and status.generation > before:
            return self._trains(view, status)
        return self._over(status)

    def _over(self, status: StatusView) -> int | None:
        if status.outcome is None:
            return None
        complain(f"the job is over ({status.outcome.outcome}): {status.outcome.why}")
        return 1

    def _tell_of_machines(self, known: VersionsView, view: VersionView) -> None:
        if view.held and view.held >= known.machines:
            self._once("held", f"held by {view.held} of {known.machines} machines")
        for machine, why in view.not_held.items():
            self._once(f"not held {machine}", f"{machine} could not get it, and tries again: {why}")

    def _tell_of_trial(self, view: VersionView) -> None:
        for untold in view.untold:
            self._once(untold, f"nothing is known of its import, which is tried again: {untold}")
        if not view.tried or "tried" in self._told:
            return
        where = self._trial_of(view)
        self._once("tried", f"imported{where}")
        if view.elsewhere:
            files = ", ".join(view.elsewhere[:5]) + (" ..." if len(view.elsewhere) > 5 else "")
            self._tell(f"not versioned, since it lies outside of the source roots: {files}")

    def _trial_of(self, view: VersionView) -> str:
        """On which machine, and how long it took."""
        try:
            story = self._client.why(view.version)
        except EverstepError:
            return ""
        trials = [line.fields for line in story if line.name == "VersionTried"]
        if not trials:
            return ""
        machine, took = trials[-1].get("machine", "a machine"), trials[-1].get("took_s", 0.0)
        return f" on {machine} in {took:.1f} s"

    def _trains(self, view: VersionView, status: StatusView) -> int | None:
        if status.phase is not Phase.RUNNING:
            return self._over(status)
        if self._runs_since is None:
            self._runs_since = time.monotonic()
        first = status.finished_by_all
        if first > status.restored:
            self._tell(f"{view.name} runs: training again at step {first}{self._after(status)}")
            return 0
        if time.monotonic() - self._runs_since > NO_STEPS_S:
            self._tell(f"{view.name} runs in generation {status.generation}; no step is done yet")
            return 0
        return self._over(status)

    def _after(self, status: StatusView) -> str:
        """How long nothing was trained for it."""
        try:
            incidents = self._client.incidents().incidents
        except EverstepError:
            return ""
        mine = [each for each in incidents if _led_to(each, status.generation)]
        if not mine:
            return ""
        lost = sum(mine[-1].seconds.get(owner, 0.0) for owner in _LOST)
        return f" after {lost:.1f} s"

    def _once(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._tell(sentence)


def _led_to(incident: IncidentView, generation: Generation) -> bool:
    """Whether ranks were started with one of its rungs."""
    started = (rung for rung in incident.rungs if rung.rung is not Rung.AGGREGATE)
    return any(rung.generation == generation for rung in started)


def _due(view: VersionView) -> str:
    if view.due_at is None:
        return "another update"
    return (
        f"the end of its window on {time.strftime('%d %b at %H:%M', time.localtime(view.due_at))}"
    )


def say(sentence: str) -> None:
    """One line, at once."""
    sys.stdout.write(sentence + "\n")
    sys.stdout.flush()


def complain(sentence: str, detail: str = "") -> None:
    """An error: one line on standard error, and below it what there is to see."""
    below = f"{detail.rstrip()}\n" if detail else ""
    sys.stderr.write(f"everstep: {sentence}\n{below}")


def silent(sentence: str) -> None:
    """For --json."""
    del sentence
