"""ib.port: an InfiniBand, RoCE or EFA port that worked is not active, or was not for a moment.

One check for both, as net.link: a link that breaks is one event, one that stays broken is two.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.net.counters import growth, just_before
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.ports import ACTIVE, Port, Ports
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result


class PortCheck(Check[Ports, PortLimits]):
    """Ports that were never active have no cable, or are nobody's: they are not judged."""

    name = "ib.port"
    source = "infiniband"
    about = "InfiniBand, RoCE and EFA ports that are not active any more, or flap"
    limits_type = PortLimits
    again_s = 30.0
    """ByteRobust finds a flapping port within 30 s (Table 3)."""

    def judge(self, here: Here, history: History[Ports]) -> Iterator[Result]:
        first = history.first.sample.ports
        past = just_before(history)
        before = past.ports if past else {}
        lent = () if here.hcas else history.now.sample.lent
        for name, port in history.now.sample.ports.items():
            if ignored(name, here, self.limits):
                continue
            if not port.was_active and (name not in first or first[name].state != ACTIVE):
                yield self.passed(f"{name} is {port.state or port.why}, as at the start", name)
            else:
                result = self._judge(name, port, before.get(name))
                if name.partition("/")[0] in lent:  # who has it now may set it down
                    result = replace(result, counts=Counts.NEVER)
                yield result

    def _judge(self, name: str, port: Port, before: Port | None) -> Result:
        if not port.state:
            return self.could_not_run(f"{name}: {port.why}", name)
        if port.state == ACTIVE:
            times = flaps(before, port) if before else 0
            if not times:
                return self.passed(f"{name} is active", name, port_active=1.0)
            why = f"{name} lost its link {times} times and is active again"
            return self._fails(name, why.replace("1 times", "once"), 1.0, "")
        why = f"{name} is {port.state} ({port.physical or 'unknown'}) and was {ACTIVE}"
        # With a link and without a subnet manager, a port waits in INIT or ARMED.
        cause = "subnet manager" if port.state in {"INIT", "ARMED"} else ""
        return self._fails(name, why, 0.0, cause)

    def _fails(self, name: str, why: str, active: float, cause: str) -> Result:
        do = f"Check the cable and transceiver of {name}, and the switch port at its other end."
        if cause:
            do = "See whether a subnet manager runs and reaches this port (sminfo)."
        return self.found(
            Verdict.WARN,
            Category.INFINIBAND_ERROR,
            why,
            do,
            item=name,
            counts=Counts.TWICE,
            cause=cause,
            values={"port_active": active},
        )


def flaps(before: Port, now: Port) -> int:
    """How often the link went down between two looks, not counting a "down" that was seen.

    The counter may be a second behind the state.
    """
    downed = growth(before.downed, now.downed) or 0
    return downed if before.state == ACTIVE else max(0, downed - 1)
