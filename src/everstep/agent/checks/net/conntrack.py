"""net.conntrack: the kernel's table of tracked connections is full, and drops new ones."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.tcp import Tcp
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class ConntrackLimits(Limits, frozen=True, kw_only=True):
    """What counts as full."""

    full: float = 0.95
    """Part of the table that is taken. The kernel drops at 1; a burst of connections of a starting
    job takes the last twentieth at once."""


class ConntrackCheck(Check[Tcp, ConntrackLimits]):
    """Connections then time out in silence, while those that stand go on."""

    name = "net.conntrack"
    source = "net.tcp"
    about = "the table of tracked connections is full (nf_conntrack_count)"
    limits_type = ConntrackLimits

    def judge(self, here: Here, history: History[Tcp]) -> Iterator[Result]:
        del here
        tracked, most = history.now.sample.tracked, history.now.sample.tracked_most
        if tracked is None or not most:
            return
        said = f"{tracked} of {most} connections are tracked"
        values = {"conntrack_ratio": tracked / most}
        if tracked < self.limits.full * most:
            yield self.passed(said, "", **values)
            return
        do = "Find out who opens so many, or raise net.netfilter.nf_conntrack_max."
        yield self.found(Verdict.WARN, Category.INFINIBAND_ERROR, said, do, values=values)
