"""net.mtu: the largest packet of an interface that the job uses has changed since the start."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.ignoring import judged_as_ports
from everstep.agent.checks.net.interfaces import Interfaces
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class MtuCheck(Check[Interfaces, Limits]):
    """Small packets pass, large ones are lost: connections open and then hang."""

    name = "net.mtu"
    source = "net"
    about = "interfaces whose MTU is not what it was at the start"

    def judge(self, here: Here, history: History[Interfaces]) -> Iterator[Result]:
        now, first = history.now.sample.interfaces, history.first.sample
        for name in sorted(now):
            began = first.interfaces.get(name)
            mtu = now[name].mtu
            ports = judged_as_ports(now[name].rdma, here)
            needed = name in history.now.sample.used or bool(ports)
            if began is None or began.mtu is None or mtu is None or not needed:
                continue
            if mtu == began.mtu:
                yield self.passed(f"the MTU of {name} is {mtu}", name)
                continue
            yield self.found(
                Verdict.SUSPECT,
                Category.INFINIBAND_ERROR,
                f"the MTU of {name} is {mtu}, and was {began.mtu} at the start",
                f"Find out who changed it, and set it back: ip link set {name} mtu {began.mtu}.",
                item=name,
            )
