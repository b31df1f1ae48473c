"""ib.transport: connections over an RDMA port time out, or meet errors.

Never a strike against this machine: what is counted here may be the other end's fault. It says who
is tested first when the job stops.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.net.counters import rates, too_fast
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.port_counters import AllPortCounters
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

SAYS = {
    "rnr_nak_retry_err": "the receiver had no buffer ready for too long",
    "local_ack_timeout_err": "packets were not acknowledged",
    "packet_seq_err": "packets were missing",
    "rx_icrc_encapsulated": "packets arrived with a wrong checksum",
    "req_cqe_error": "requests failed",
    "resp_cqe_error": "answers to requests failed",
    "roce_slow_restart": "connections restarted slowly after congestion",
    "retrans_timeout_events": "packets were sent again after a time-out",
    "unresponsive_remote_events": "the other end did not answer",
    "impaired_remote_conn_events": "a connection runs at reduced speed",
    "rx_drops": "packets arrived and were dropped",
}


class TransportLimits(PortLimits, frozen=True, kw_only=True):
    """Events a second above which something is wrong. The first three marked NVSentinel are its
    defaults; others are ours, low enough to be seen and high enough for a busy network.
    """

    window_s: Seconds = 30.0
    """Over which they are counted."""
    rnr_nak_retry_err_per_s: float = 0.0
    """Any ends a connection (NVSentinel)."""
    local_ack_timeout_err_per_s: float = 1.0
    """A few happen whenever a route changes (NVSentinel)."""
    roce_slow_restart_per_s: float = 10.0
    """Congestion (NVSentinel)."""
    packet_seq_err_per_s: float = 100.0
    """Losses on the way; many of them are repaired without harm."""
    rx_icrc_encapsulated_per_s: float = 1.0
    """Bits that flipped where no link noticed: hardly ever."""
    req_cqe_error_per_s: float = 1.0
    """The end of a job flushes requests as well."""
    resp_cqe_error_per_s: float = 1.0
    """As above."""
    retrans_timeout_events_per_s: float = 10.0
    """EFA: some under load."""
    unresponsive_remote_events_per_s: float = 0.0
    """EFA: a peer is gone."""
    impaired_remote_conn_events_per_s: float = 0.0
    """EFA: a path is bad."""
    rx_drops_per_s: float = 100.0
    """EFA: the host is too slow in giving buffers."""


class TransportCheck(Check[AllPortCounters, TransportLimits]):
    """Counters of the reliable transport in the card."""

    name = "ib.transport"
    source = "infiniband.counters"
    about = "RDMA connections that time out or fail (ports/*/hw_counters)"
    limits_type = TransportLimits
    keep = 7

    def judge(self, here: Here, history: History[AllPortCounters]) -> Iterator[Result]:
        old = history.since(self.limits.window_s)[0]
        seconds = max(history.now.at - old.at, self.limits.window_s)
        for name, now in history.now.sample.ports.items():
            if ignored(name, here, self.limits) or not any(each in now.counts for each in SAYS):
                continue
            before = old.sample.ports.get(name)
            if before is None or old is history.now:
                yield self.passed(f"{name}: looked at for the first time", name)
                continue
            yield self._judge(name, rates(before.counts, now.counts, SAYS, seconds))

    def _judge(self, name: str, found: dict[str, float]) -> Result:
        over = too_fast(found, self.limits)
        values = {f"{each}_per_s": rate for each, rate in found.items()}
        if not over:
            return self.passed(f"{name}: no unusual events of its connections", name, **values)
        said = "; ".join(f"{SAYS[each]} ({each} {rate:.3g}/s)" for each, rate in over.items())
        return self.found(
            Verdict.WARN,
            Category.INFINIBAND_ERROR,
            f"{name}: {said}",
            "Look at the machines that it talks to as well: the other end may be the guilty one.",
            item=name,
            values=values,
        )
