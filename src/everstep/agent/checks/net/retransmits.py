"""net.tcp: many TCP segments have to be sent again."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.counters import growth
from everstep.agent.checks.net.tcp import Tcp
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds


class RetransmitsLimits(Limits, frozen=True, kw_only=True):
    """What counts as many."""

    again_max: float = 0.01
    """Segments sent again as a part of all. A data-centre network stays below 0.1 %; at 1 % TCP
    loses most of its speed."""
    segments_min: int = 1000
    """Fewer within the window say nothing: a few connections to a dead host are many per cent."""
    window_s: Seconds = 60.0
    """Over which they are counted: several round trips of back-off."""


class RetransmitsCheck(Check[Tcp, RetransmitsLimits]):
    """Never a strike: the other end or the way there may be the guilty one."""

    name = "net.tcp"
    source = "net.tcp"
    about = "TCP segments that this machine sends again (/proc/net/snmp)"
    limits_type = RetransmitsLimits
    keep = 6

    def judge(self, here: Here, history: History[Tcp]) -> Iterator[Result]:
        del here
        old, now = history.since(self.limits.window_s)[0].sample.counts, history.now.sample.counts
        sent = growth(old.get("OutSegs"), now.get("OutSegs"))
        again = growth(old.get("RetransSegs"), now.get("RetransSegs"))
        if sent is None or again is None:
            yield self.passed("counters of TCP were reset")
            return
        ratio = again / sent if sent else 0.0
        values = {"tcp_retransmit_ratio": ratio, "tcp_retransmits": float(again)}
        said = f"{again} of {sent} TCP segments were sent again in {self.limits.window_s:g} s"
        if sent < self.limits.segments_min or ratio <= self.limits.again_max:
            yield self.passed(said, "", **values)
            return
        yield self.found(
            Verdict.WARN,
            Category.INFINIBAND_ERROR,
            f"{said}, {ratio:.1%}; at most {self.limits.again_max:.1%} is healthy",
            "Look for a congested or faulty link: ss -ti shows which connections send again.",
            values=values,
        )
