"""ib.errors: an RDMA port counts errors of its link faster than a healthy one does."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History, Stamped
from everstep.agent.checks.net.counters import growth, rates, too_fast
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.port_counters import AllPortCounters, PortCounters
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds

FULL = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
    "port_xmit_discards": 0xFFFF,
}
"""Where the counters of the specification stop: they do not wrap."""
_HARD = ("local_link_integrity_errors", "excessive_buffer_overrun_errors")
_AN_HOUR: Seconds = 3600.0


class PortErrorLimits(PortLimits, frozen=True, kw_only=True):
    """Errors a second above which a link is not healthy. A site with long optical links may want
    more; defaults without another source are those of NVIDIA's NVSentinel.
    """

    window_s: Seconds = 30.0
    """Over which they are counted."""
    symbol_error_per_s: float = 10.0
    """Bits on the wire that came out wrong and could not be corrected."""
    symbol_error_per_hour: float = 120.0
    """The same in the long run, since the start of the job: the bit error rate that the InfiniBand
    specification allows."""
    link_error_recovery_per_s: float = 5 / 60
    """The link had to be trained anew, for milliseconds."""
    port_rcv_errors_per_s: float = 10.0
    """Packets that arrived broken."""
    port_rcv_remote_physical_errors_per_s: float = 10.0
    """Packets that arrived and were marked as broken on an earlier link: another one is guilty."""
    local_link_integrity_errors_per_s: float = 0.0
    """Too many errors at once for the link's own tolerance. Any is too much."""
    excessive_buffer_overrun_errors_per_s: float = 0.0
    """Flow control of the link failed. Any is too much."""
    port_xmit_discards_per_s: float = 100.0
    """Packets dropped because the way was blocked: congestion, rarely this machine's fault."""


class PortErrorsCheck(Check[AllPortCounters, PortErrorLimits]):
    """Symbol errors, recoveries, receive errors, integrity, overruns, discards."""

    name = "ib.errors"
    source = "infiniband.counters"
    about = "error counters of RDMA ports that grow too fast (ports/*/counters)"
    limits_type = PortErrorLimits
    keep = 12
    """Twice the window: a link that was trained anew counts errors for a while."""
    again_s = 60.0

    def judge(self, here: Here, history: History[AllPortCounters]) -> Iterator[Result]:
        old = history.since(self.limits.window_s)[0]
        for name, now in history.now.sample.ports.items():
            if not ignored(name, here, self.limits) and any(each in now.counts for each in FULL):
                yield self._judge(name, now, old, history)
            elif now.why and not ignored(name, here, self.limits):
                yield self.could_not_run(f"{name}: {now.why}", name)

    def _judge(
        self,
        name: str,
        now: PortCounters,
        old: Stamped[AllPortCounters],
        history: History[AllPortCounters],
    ) -> Result:
        before = old.sample.ports.get(name)
        if before is None:
            return self.passed(f"{name}: looked at for the first time", name)
        earliest = (*history.past, history.now)[0].sample.ports.get(name, before)
        if earliest.counts.get("link_downed") != now.counts.get("link_downed"):
            # A link that goes down breaks packets: that is one event, and ib.port tells it.
            return self.passed(f"{name}: its link went down, which ib.port judges", name)
        seconds = max(history.now.at - old.at, self.limits.window_s)
        found = rates(before.counts, now.counts, FULL, seconds)
        over = too_fast(found, self.limits)
        values = {f"{each}_per_s": rate for each, rate in found.items()}
        if over:
            return self._fails(name, over, values)
        if hourly := self._hourly(name, history):
            why = f"{name} has had {hourly:.0f} symbol errors an hour since the start"
            return self._found(name, Verdict.WARN, why, Counts.NEVER, values)
        return self._passes(name, now, values)

    def _passes(self, name: str, now: PortCounters, values: dict[str, float]) -> Result:
        full = [each for each, most in FULL.items() if now.counts.get(each) == most]
        if full:
            do = "Clear the counters of this port: perfquery -R."
            return self.could_not_run(f"{name}: {full[0]} is full and counts no more", name, do)
        if now.why:
            return self.could_not_run(f"{name}: {now.why}", name)
        return self.passed(f"{name} has no unusual errors", name, **values)

    def _fails(self, name: str, over: dict[str, float], values: dict[str, float]) -> Result:
        said = ", ".join(f"{each} {rate:.3g}/s" for each, rate in over.items())
        hard = any(each in _HARD for each in over)
        congestion = set(over) == {"port_xmit_discards"}
        return self._found(
            name,
            Verdict.WARN if congestion else Verdict.SUSPECT,
            f"{name} counts errors too fast: {said}",
            Counts.TWICE if hard else Counts.NEVER,
            values,
        )

    def _found(
        self, name: str, verdict: Verdict, why: str, counts: Counts, values: dict[str, float]
    ) -> Result:
        do = f"Check the cable and transceiver of {name} (mlxlink, ibdiagnet) and its switch port."
        category = Category.INFINIBAND_ERROR
        return self.found(verdict, category, why, do, item=name, counts=counts, values=values)

    def _hourly(self, name: str, history: History[AllPortCounters]) -> float:
        """Symbol errors an hour if they are too many and still grow, else 0."""
        first = history.first
        seconds = history.now.at - first.at
        count = "symbol_error"
        now = history.now.sample.ports[name].counts.get(count)
        began = first.sample.ports.get(name)
        since = history.past[0].sample.ports.get(name) if history.past else None
        if began is None or since is None or seconds < _AN_HOUR:
            return 0.0
        grown = growth(began.counts.get(count), now)
        if not grown or not growth(since.counts.get(count), now):
            return 0.0
        hourly = grown / seconds * _AN_HOUR
        return hourly if hourly > self.limits.symbol_error_per_hour else 0.0
