"""net.link: an interface that the job uses has no link, had none for a moment, or is gone.

One check for "down" and "flapped", because a link that breaks is one event: two within five minutes
evict. A link that stays down is told again after 30 s, and so counts twice by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.counters import growth, just_before
from everstep.agent.checks.net.ignoring import judged_as_ports
from everstep.agent.checks.net.interfaces import Interface, Interfaces
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result

_NETWORK = Category.INFINIBAND_ERROR


class LinkCheck(Check[Interfaces, Limits]):
    """Carrier of every interface."""

    name = "net.link"
    source = "net"
    about = "interfaces of the job without a link, with flaps, or gone (/sys/class/net)"
    again_s: ClassVar[float] = 30.0
    """ByteRobust finds a NIC crash and a flapping port within 30 s (Table 3)."""

    def judge(self, here: Here, history: History[Interfaces]) -> Iterator[Result]:
        now = history.now.sample
        # Those of the start too: a source that begins anew does not know what has lost its route.
        used = dict.fromkeys((*history.first.sample.used, *now.used))
        for name in used:
            yield self._used(here, name, history)
        for name in sorted(set(now.interfaces) - set(used)):
            state = {True: "up", False: "down", None: "unknown"}[now.interfaces[name].up]
            yield self.passed(f"{name} is {state}; the job does not use it", name)

    def _used(self, here: Here, name: str, history: History[Interfaces]) -> Result:
        interface = history.now.sample.interfaces.get(name)
        if interface is None:
            return self._gone(here, name, history)
        if interface.up is None:
            return self.could_not_run(f"{name}: {interface.why}", name)
        if ports := judged_as_ports(interface.rdma, here):
            # One broken cable must not be two alerts, and RDMA needs more than a carrier.
            return self.passed(f"{name} is judged by ib.port as {', '.join(ports)}", name)
        values = {"link_up": float(interface.up)}
        if not interface.up:
            began = history.first.sample.interfaces.get(name)
            worked = interface.was_up or (began is not None and began.up is True)
            why = f"{name} is down: {interface.why}" + ("" if worked else "; it was never up")
            # A prefix of names (NCCL_SOCKET_IFNAME=eth) names also what has no cable.
            return self._fails(name, why, values, Counts.TWICE if worked else Counts.NEVER)
        past = just_before(history)
        before = past.interfaces.get(name) if past else None
        if before is not None and (times := flaps(before, interface)):
            why = f"{name} lost its link {times} times for less than a second, and has it again"
            return self._fails(name, why.replace("1 times", "once"), values, Counts.TWICE)
        return self.passed(f"{name} is up", name, **values)

    def _fails(self, name: str, why: str, values: dict[str, float], counts: Counts) -> Result:
        do = f"Check the cable and transceiver of {name}, and the switch port at its other end."
        return self.found(Verdict.WARN, _NETWORK, why, do, item=name, counts=counts, values=values)

    def _gone(self, here: Here, name: str, history: History[Interfaces]) -> Result:
        seen = (history.first, *history.past)
        earlier = [each.sample.interfaces[name] for each in seen if name in each.sample.interfaces]
        if not earlier:
            do = "Name the interfaces that the machine has."
            return self.could_not_run(f"this machine has never had an interface {name}", name, do)
        why = f"{name} was here and is gone"
        do = (
            "Look in the kernel log for why its driver let go of the card; reboot, then replace it."
        )
        if name in here.interfaces or earlier[0].physical:
            return self.found(Verdict.EVICT, _NETWORK, why, do, item=name)
        # A virtual one with a default route may be a VPN that somebody ended.
        return self.found(Verdict.WARN, _NETWORK, why, do, item=name, counts=Counts.TWICE)


def flaps(before: Interface, now: Interface) -> int:
    """How often the link went away between two looks, not counting one that was seen down.

    Coming back from a "down" that was told already is no new event.
    """
    changes = growth(before.changes, now.changes)
    return 0 if changes is None else changes // 2
