"""ib.traffic: bytes a second over each RDMA port, and ports that fell silent.

Silence is a hint and no fault: a job that evaluates, saves or hangs sends nothing. Hang detection
and metrics take its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.net.counters import growth, total
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.port_counters import AllPortCounters
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

WORD_BYTES = 4
"""The specification counts in words of four bytes."""
_SENT = {"port_xmit_data": WORD_BYTES, "tx_bytes": 1, "rdma_write_bytes": 1}
_RECEIVED = {
    "port_rcv_data": WORD_BYTES,
    "rx_bytes": 1,
    "rdma_write_recv_bytes": 1,
    "rdma_read_bytes": 1,
}
_CONGESTED = ("np_cnp_sent", "rp_cnp_handled")


class TrafficLimits(PortLimits, frozen=True, kw_only=True):
    """What counts as silent."""

    silent_bytes_per_s: float = 1000.0
    """Subnet managers and keep-alives send less, every collective far more."""
    silent_s: Seconds = 120.0
    """A port that was busy is silent after so long. ByteRobust looks into a job after 600 s without
    RDMA traffic; this is an earlier hint, longer than most pauses between steps."""
    busy_bytes: float = 1e9
    """Bytes since the start of the job that make a port a busy one."""


class TrafficCheck(Check[AllPortCounters, TrafficLimits]):
    """Data counters, those of EFA too."""

    name = "ib.traffic"
    source = "infiniband.counters"
    about = "traffic of RDMA ports, and busy ones that fell silent"
    limits_type = TrafficLimits
    keep = 26

    def judge(self, here: Here, history: History[AllPortCounters]) -> Iterator[Result]:
        for name, now in history.now.sample.ports.items():
            if ignored(name, here, self.limits) or not (set(now.counts) & {*_SENT, *_RECEIVED}):
                continue
            values = self._values(name, history)
            said = f"{name}: " + (
                f"{values['rx_bytes_per_s'] + values['tx_bytes_per_s']:.3g} bytes/s"
                if values
                else "its traffic is not known yet"
            )
            if not self._silent(name, history):
                yield self.passed(said, name, **values)
                continue
            yield self.found(
                Verdict.WARN,
                Category.INFINIBAND_ERROR,
                f"{name} was busy and has been silent for {self.limits.silent_s:g} s",
                "See whether the job trains, saves or hangs; a hang has its own alarms.",
                item=name,
                values=values,
            )

    def _values(self, name: str, history: History[AllPortCounters]) -> dict[str, float]:
        """Rates since the sample before."""
        if not history.past:
            return {}
        before = history.past[-1].sample.ports.get(name)
        seconds = history.now.at - history.past[-1].at
        if before is None or seconds <= 0:
            return {}
        now = history.now.sample.ports[name].counts
        sent, received = _bytes(before.counts, now, _SENT), _bytes(before.counts, now, _RECEIVED)
        if sent is None or received is None:
            return {}
        values = {"tx_bytes_per_s": sent / seconds, "rx_bytes_per_s": received / seconds}
        congested = total(before.counts, now, _CONGESTED)
        if congested is not None:
            values["congestion_packets_per_s"] = congested / seconds
        waited = growth(before.counts.get("port_xmit_wait"), now.get("port_xmit_wait"))
        if waited is not None:
            values["transmit_wait_ticks_per_s"] = waited / seconds
        return values

    def _silent(self, name: str, history: History[AllPortCounters]) -> bool:
        limits = self.limits
        now = history.now.sample.ports[name].counts
        first = history.first.sample.ports.get(name)
        whole = [
            each
            for each in history.past
            if each.at <= history.now.at - limits.silent_s and name in each.sample.ports
        ]
        if first is None or not whole:
            return False
        both = {**_SENT, **_RECEIVED}
        ever = _bytes(first.counts, now, both)
        lately = _bytes(whole[-1].sample.ports[name].counts, now, both)
        if ever is None or lately is None or ever < limits.busy_bytes:
            return False
        return lately / (history.now.at - whole[-1].at) < limits.silent_bytes_per_s


def _bytes(
    old: Mapping[str, int], new: Mapping[str, int], units: Mapping[str, int]
) -> float | None:
    """None if a counter was reset, or there is none."""
    parts = [
        (growth(old[name], new[name]), unit)
        for name, unit in units.items()
        if name in old and name in new
    ]
    grown = [count * unit for count, unit in parts if count is not None]
    return float(sum(grown)) if parts and len(grown) == len(parts) else None
