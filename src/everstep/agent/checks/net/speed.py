"""net.speed: an interface that the job uses became slower, or is slower than its equals here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.ignoring import judged_as_ports
from everstep.agent.checks.net.interfaces import Interface, Interfaces
from everstep.agent.checks.net.peers import usual
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class SpeedLimits(Limits, frozen=True, kw_only=True):
    """What counts as slow."""

    expected_mbps: int = 0
    """Mbit/s that every used interface must have. 0, the default: what it had at the start, and
    what most equal cards of the machine have; sites know better than we do."""


class SpeedCheck(Check[Interfaces, SpeedLimits]):
    """Negotiated speed. Slow is no stop: it decides who is tested first at the next one."""

    name = "net.speed"
    source = "net"
    about = "interfaces of the job that are slower than at the start or than their equals"
    limits_type = SpeedLimits

    def judge(self, here: Here, history: History[Interfaces]) -> Iterator[Result]:
        now = history.now.sample
        used = {
            name: now.interfaces[name]
            for name in now.used
            if name in now.interfaces
            and not judged_as_ports(now.interfaces[name].rdma, here)  # ib.rate judges those
        }
        for name, interface in used.items():
            speed = interface.speed_mbps
            if not interface.up or speed is None:
                continue  # virtual ones have no speed
            wanted, whose = self._wanted(name, used, history.first.sample.interfaces)
            values = {"speed_mbps": float(speed)}
            if speed >= wanted:
                yield self.passed(f"{name} runs at {speed} Mbit/s", name, **values)
                continue
            why = f"{name} runs at {speed} Mbit/s instead of {wanted}, {whose}"
            do = f"Check the cable and transceiver of {name} and the settings of its switch port."
            yield self.found(
                Verdict.SUSPECT, Category.INFINIBAND_ERROR, why, do, item=name, values=values
            )

    def _wanted(
        self, name: str, used: Mapping[str, Interface], first: Mapping[str, Interface]
    ) -> tuple[float, str]:
        if self.limits.expected_mbps:
            return self.limits.expected_mbps, "which is expected"
        began = first[name].speed_mbps if name in first else None
        equals = {
            each: float(other.speed_mbps)
            for each, other in used.items()
            if other.driver == used[name].driver and other.up and other.speed_mbps
        }
        most = usual(equals) or 0
        if began is not None and began >= most:
            return began, "as at the start"
        return most, "as most interfaces with the same driver"
