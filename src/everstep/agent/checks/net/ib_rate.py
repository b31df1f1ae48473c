"""ib.rate: an RDMA port runs slower than at the start, or than equal ports of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.peers import usual
from everstep.agent.checks.net.ports import ACTIVE, Port, Ports
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class RateLimits(PortLimits, frozen=True, kw_only=True):
    """What counts as slow."""

    expected_gbps: float = 0.0
    """Gbit/s that every active port must have. 0, the default: what it had at the start, and what
    most ports of equal cards have. gpud expects 8 ports of 400 on H100, H200, B200 and GB200, and
    one of 200 on A100; a port for storage may well have less."""


class RateCheck(Check[Ports, RateLimits]):
    """A lane of a cable that is lost halves the rate, and with it the whole job's."""

    name = "ib.rate"
    source = "infiniband"
    about = "RDMA ports that run slower than at the start or than their equals"
    limits_type = RateLimits

    def judge(self, here: Here, history: History[Ports]) -> Iterator[Result]:
        active = {
            name: port
            for name, port in history.now.sample.ports.items()
            if port.state == ACTIVE and not ignored(name, here, self.limits)
        }
        for name, port in active.items():
            rate = port.rate_gbps
            if rate is None:
                yield self.could_not_run(f"{name}: its rate cannot be read", name)
                continue
            wanted, whose = self._wanted(name, active, history.first.sample.ports)
            values = {"rate_gbps": rate}
            if rate >= wanted:
                yield self.passed(f"{name} runs at {rate:g} Gbit/s", name, **values)
                continue
            yield self.found(
                Verdict.SUSPECT,
                Category.INFINIBAND_ERROR,
                f"{name} runs at {rate:g} Gbit/s instead of {wanted:g}, {whose}",
                f"Check the cable and transceiver of {name} (mlxlink, ibdiagnet) and its switch.",
                item=name,
                values=values,
            )

    def _wanted(
        self, name: str, active: Mapping[str, Port], first: Mapping[str, Port]
    ) -> tuple[float, str]:
        if self.limits.expected_gbps:
            return self.limits.expected_gbps, "which is expected"
        began = first[name].rate_gbps if name in first and first[name].state == ACTIVE else None
        equals = {
            each: port.rate_gbps
            for each, port in active.items()
            if port.rate_gbps and port.board == active[name].board
        }
        most = usual(equals) or 0.0
        if began is not None and began >= most:
            return began, "as at the start"
        return most, "as most ports of equal cards"
