"""The attached viewer of `everstep run` and `everstep attach`: shows a job, and may ask it to stop.

The job lives in detached processes and needs no viewer: a lost terminal ends this one alone. The
first Ctrl-C (or SIGTERM) asks the controller to stop the job and waits for that; the second ends
everything of the job on this host. A controller that dies is waited for: ranks go on meanwhile.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from rich.text import Text

from everstep.cluster.cleanup import clean_job
from everstep.commands import jobs, offline, tables
from everstep.commands.client import Away, Client, Declined, TokenRefused
from everstep.commands.plan import Shown
from everstep.commands.presses import Presses
from everstep.commands.screen import Screen
from everstep.controller.views import IncidentsView, StatusView
from everstep.core.state import Phase
from everstep.model import EverstepError, MachineId, Rank
from everstep.paths import JobPaths, JobResult

WAIT_S = 0.5
"""Longest wait for a line of output in one request: how soon a Ctrl-C is acted on."""
STATUS_EVERY_S = 0.5
AWAY_POLL_S = 0.2
UNHEARD_S = 10.0
"""Silence of the controller after which the viewer says what its log says, or, where nothing of
the job runs on this host, gives up. A killed controller is back in one to two seconds."""
LOG_LINES = 5
TO_FORCE = 2
"""Ctrl-C so often ends the job by force."""
STOPPED_BY_FORCE = 130
"""Exit code after the second Ctrl-C: that of a shell's command ended by SIGINT."""


class JobGone(EverstepError):
    """Nothing of the job is left, and it never said how it ended."""


class Watched(NamedTuple):
    """The job a viewer looks at."""

    paths: JobPaths
    client: Client
    nproc_per_node: int
    shown: Shown = Shown()
    machine: MachineId | None = None
    """Show this machine's ranks alone, as torchrun does on each host; None: all."""
    reports: bool = True
    """Whether to tell of incidents. On several hosts one viewer is enough."""


class Seen(NamedTuple):
    """What the viewer knows when the job is over."""

    exit_code: int
    result: JobResult | None
    incidents: IncidentsView | None


class Viewer:
    """One look at one job, until it ends."""

    def __init__(self, watched: Watched, screen: Screen, presses: Presses) -> None:
        self._watched = watched
        self._screen = screen
        self._status: StatusView | None = None
        self._incidents: IncidentsView | None = None
        self._after = 0
        self._status_at = 0.0
        self._presses = presses
        self._stop_sent = False
        self._stop_waits = False
        self._away_since: float | None = None
        self._away_said = False
        self._log_said = False

    def watch(self) -> Seen:
        """Show the job until it is over. JobGone if it never will be."""
        while self._presses.count < TO_FORCE:
            if self._step():
                return self._over()
        return self._force()

    def _step(self) -> bool:
        """One round; True when the job is over and all of it was shown."""
        ended = jobs.result_of(self._watched.paths) is not None
        try:
            self._ask_to_stop()
            self._show_status(at_once=ended)
            self._show_output(0.0 if ended else WAIT_S)
        except TokenRefused:
            if not ended:  # else it is another job that got the port of this one
                raise
            return True
        except Away as away:
            return ended or self._over_elsewhere() or self._wait_return(away)
        self._away_since = None
        self._log_said = False
        return ended or (self._over_elsewhere() and self._watched.paths.result.exists())

    # --- one round ---

    def _show_output(self, wait_s: float) -> None:
        ranks = self._ranks()
        if ranks is not None and not ranks:
            time.sleep(wait_s)  # a standby: whatever it will show comes after this
            return
        page = self._watched.client.output(self._after, wait_s)
        self._after = page.next
        shown, nproc = self._watched.shown, self._watched.nproc_per_node
        self._screen.rank_lines(
            [
                f"[rank{line.rank}]: {line.text}"
                for line in page.lines
                if (ranks is None or line.rank in ranks) and shown.shows(line.rank % nproc)
            ]
        )

    def _ranks(self) -> tuple[Rank, ...] | None:
        """The ranks to show; None: all of them."""
        if self._watched.machine is None or self._status is None:
            return None if self._watched.machine is None else ()
        return next(
            (m.ranks for m in self._status.machines if m.machine == self._watched.machine), ()
        )

    def _show_status(self, *, at_once: bool) -> None:
        if time.monotonic() < self._status_at + STATUS_EVERY_S and not at_once:
            return
        status = self._watched.client.status()
        self._status_at = time.monotonic()
        if self._watched.reports:
            if _differ(self._status, status):
                self._show_incidents(self._watched.client.incidents())
            for line in tables.news(self._status, status):
                self._screen.say(line)
        self._status = status
        self._screen.progress(tables.progress(status))

    def _show_incidents(self, now: IncidentsView) -> None:
        known = {i.incident: i for i in (self._incidents.incidents if self._incidents else ())}
        for incident in now.incidents:
            before = known.get(incident.incident)
            if before is None:
                self._screen.say(tables.opened(incident))
            if incident.closed_at is not None and (before is None or before.closed_at is None):
                self._screen.say(tables.closed(incident))
        self._incidents = now

    def _wait_return(self, away: Away) -> bool:
        """The controller does not answer: say so once, go on asking, give up where it is over."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        if self._status is not None and not self._away_said:
            self._away_said = True
            self._screen.say("the controller does not answer; ranks go on, waiting for it")
        if now - self._away_since > UNHEARD_S:
            if not jobs.runs_here(self._watched.paths):
                raise JobGone(
                    f"Nothing of job {self._name} runs on this host any more and it did not say "
                    f"how it ended: `everstep controller {self._name} --resume` brings it back, "
                    f"`everstep clean {self._name}` removes what is left."
                )
            self._say_log(away)
        time.sleep(AWAY_POLL_S)
        return False

    def _say_log(self, away: Away) -> None:
        if self._log_said:
            return
        self._log_said = True
        lines = last_lines(self._watched.paths, LOG_LINES)
        self._screen.say(f"{away} {' / '.join(lines)}".rstrip())

    # --- the end ---

    def _ask_to_stop(self) -> None:
        if not self._presses.count or self._stop_sent:
            return
        try:
            self._watched.client.stop("Ctrl-C in the viewer")
        except Declined as declined:
            self._screen.say(str(declined))
        except Away:
            if not self._stop_waits:
                self._stop_waits = True
                self._screen.say(
                    "the controller does not answer: the job will be stopped when it is back; "
                    "Ctrl-C again ends all of it on this host now"
                )
            raise
        else:
            self._screen.say("stopping the job; Ctrl-C again ends all of it on this host at once")
        self._stop_sent = True

    def _force(self) -> Seen:
        cleaned = clean_job(self._watched.paths.root)
        self._screen.say(f"ended by force: {cleaned}")
        return Seen(STOPPED_BY_FORCE, None, self._incidents)

    def _over_elsewhere(self) -> bool:
        """Whether the controller, on another host, said that the job is over."""
        return (
            self._status is not None
            and self._status.outcome is not None
            and (self._status.phase in (Phase.ENDED, Phase.ENDING))
        )

    def _over(self) -> Seen:
        result = jobs.result_of(self._watched.paths) or self._result_elsewhere()
        incidents = self._last_incidents()
        if incidents is not None and self._watched.reports:
            self._show_incidents(incidents)
            if incidents.incidents:
                self._screen.show(tables.incidents(incidents))
            self._screen.say(tables.account(incidents.seconds, incidents.ettr))
        if result.detail:
            self._screen.show(Text(result.detail.rstrip()))
        self._screen.say(f"job {self._name} {result.outcome}: {result.why}")
        return Seen(result.exit_code, result, incidents)

    def _result_elsewhere(self) -> JobResult:
        outcome = self._status.outcome if self._status is not None else None
        assert outcome is not None, "asked only when the job is over"
        return JobResult(
            outcome=outcome.outcome,
            exit_code=outcome.exit_code,
            why=outcome.why,
            detail=outcome.detail,
        )

    def _last_incidents(self) -> IncidentsView | None:
        """From the journal, which has the last word; else what the controller said last."""
        try:
            return offline.incidents(self._watched.paths)
        except EverstepError:
            return self._incidents

    @property
    def _name(self) -> str:
        return self._watched.paths.root.name


def last_lines(paths: JobPaths, count: int) -> list[str]:
    """The end of the controller's log, for a controller that does not come up."""
    try:
        return paths.controller_log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _differ(before: StatusView | None, after: StatusView) -> bool:
    """Whether an incident opened or closed."""
    if before is None:
        return after.incidents > 0
    return (before.incidents, before.incident) != (after.incidents, after.incident)
