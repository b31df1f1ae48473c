"""net.errors: an interface that the job uses loses packets."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.counters import total
from everstep.agent.checks.net.interfaces import Interface, Interfaces
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds

PACKETS = ("rx_packets", "tx_packets")
ON_THE_WIRE = ("rx_errors", "tx_errors")
LOST = (*ON_THE_WIRE, "rx_missed_errors", "tx_dropped")
"""The others are lost by the host: it was too slow to take packets, or had no room to queue them.
That happens to healthy machines, when many send to one."""
IGNORED = ("rx_dropped",)
"""Received and not wanted: also every frame of a protocol or VLAN that the host does not know."""


class ErrorsLimits(Limits, frozen=True, kw_only=True):
    """What counts as losing packets."""

    loss_max: float = 1e-4
    """Lost packets as a part of all. ByteRobust does not publish its limit. One in 10,000 is far
    above what a healthy link loses, and costs TCP a good part of its speed."""
    window_s: Seconds = 30.0
    """Over which they are counted: the interval of ByteRobust's network checks."""
    lost_min: int = 30
    """Fewer lost packets within the window say nothing: one a second, which is no loss that a job
    notices, and more than start-up or a change of multicast groups causes."""
    settle_s: Seconds = 30.0
    """What is lost until so long after a link came or went belongs to that event, which net.link
    tells: the two ends still agree about their speed then."""


class ErrorsCheck(Check[Interfaces, ErrorsLimits]):
    """Packets lost by the interface or its driver, as a part of all."""

    name = "net.errors"
    source = "net"
    about = "packets that interfaces of the job lose (/sys/class/net/*/statistics)"
    limits_type = ErrorsLimits
    keep = 35
    again_s = 60.0
    """A loss that goes on counts twice: a new window, and some seconds of grace."""

    def judge(self, here: Here, history: History[Interfaces]) -> Iterator[Result]:
        del here
        window = history.since(self.limits.window_s)
        old, now = window[0].sample, history.now.sample
        for name in now.used:
            interface, before = now.interfaces.get(name), old.interfaces.get(name)
            if interface is not None and before is not None and interface.counts:
                yield self._judge(name, before, interface)
            elif interface is not None and not interface.counts:
                yield self.could_not_run(f"{name}: its packet counters cannot be read", name)

    def _judge(self, name: str, before: Interface, now: Interface) -> Result:
        recent = self.limits.window_s + self.limits.settle_s
        changed = now.changed_s is not None and now.changed_s < recent
        if changed or before.changes != now.changes or not now.up:
            return self.passed(f"{name}: its link changed, which net.link judges", name)
        packets = total(before.counts, now.counts, PACKETS)
        lost = total(before.counts, now.counts, LOST)
        if packets is None or lost is None:
            return self.passed(f"{name}: its counters were reset", name)
        loss = lost / (packets + lost) if lost else 0.0
        values = {"lost_packets": float(lost), "loss_ratio": loss}
        unwanted = total(before.counts, now.counts, IGNORED)
        if unwanted is not None:
            values["unwanted_packets"] = float(unwanted)
        said = f"{name} lost {lost} of {packets + lost} packets in {self.limits.window_s:g} s"
        if lost < self.limits.lost_min or loss <= self.limits.loss_max:
            return self.passed(said, name, **values)
        why = f"{said}, {loss:.2g} of all; at most {self.limits.loss_max:.2g} is healthy"
        do = f"Check the cable of {name}, its ring buffers (ethtool -S, -g) and MTUs along the way."
        wire = total(before.counts, now.counts, ON_THE_WIRE) or 0
        bad = wire >= self.limits.lost_min and wire / (packets + lost) > self.limits.loss_max
        # Packets of RDMA are not among those counted: the part that is lost is smaller then.
        counts = Counts.TWICE if bad and not now.rdma else Counts.NEVER
        category = Category.INFINIBAND_ERROR
        return self.found(Verdict.WARN, category, why, do, item=name, counts=counts, values=values)
