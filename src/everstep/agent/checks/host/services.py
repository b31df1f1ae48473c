"""Check host.services: a daemon that training machines need has ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_processes import ProcessesSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds


class ServicesLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.services."""

    wanted: tuple[str, ...] = ()
    """Daemons that must run even if they did not when the machine came to the job."""
    rounds: int = 2
    """Samples in a row without it: a restart of a service is no news."""


class Services(Check[ProcessesSample, ServicesLimits]):
    """A warning: the job trains on without slurmd, and its next start does not.

    By process names: no right is needed, no command is started. In a container nothing of it is to
    be seen, and nothing is said.
    """

    name: ClassVar[str] = "host.services"
    source: ClassVar[str] = "processes"
    about: ClassVar[str] = "slurmd, munged, chronyd, fabric manager and the like have ended"
    limits_type: ClassVar[type[Limits]] = ServicesLimits
    keep: ClassVar[int] = 10
    clear_after_s: ClassVar[Seconds] = 120.0

    def judge(self, here: Here, history: History[ProcessesSample]) -> Iterable[Result]:
        del here
        wanted = dict.fromkeys((*history.first.sample.daemons, *self.limits.wanted))
        rounds = [each.sample for each in (*history.past, history.now)][-self.limits.rounds :]
        for name in wanted:
            runs = any(name in each.daemons for each in rounds)
            if runs or len(rounds) < self.limits.rounds:
                yield self.passed("it runs" if runs else "it may be starting", item=name)
            else:
                yield self.found(
                    Verdict.WARN,
                    Category.EXTERNAL_SERVICE_ERROR,
                    f"{name} does not run (any more)",
                    f"See why it ended (journalctl -u {name}), and start it again.",
                    item=name,
                )
