"""net.answers and ib.answers: the kernel does not tell of interfaces, or of RDMA ports, any more.

Found without a sample: a card whose firmware died keeps whoever asks for it, so the child that asks
is silent, and the source says so in the name of these checks (`unanswered`). With a sample they
pass. A silence that goes on is told again, and so counts twice by itself, like a link that stays
down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.ports import CLASS
from everstep.health import Result


class InterfacesAnswer(Check[Any, Limits]):
    """A second strike after half a minute more: a card's firmware may need that for a reset."""

    name = "net.answers"
    source = "net"
    about = "the kernel answers when it is asked for interfaces (/sys/class/net)"
    again_s: ClassVar[float] = 30.0

    def judge(self, here: Here, history: History[Any]) -> Iterator[Result]:
        del here, history
        yield self.passed("/sys/class/net answers")


class PortsAnswer(Check[Any, Limits]):
    """Likewise."""

    name = "ib.answers"
    source = "infiniband"
    about = f"the kernel answers when it is asked for RDMA ports ({CLASS})"
    again_s: ClassVar[float] = 30.0

    def judge(self, here: Here, history: History[Any]) -> Iterator[Result]:
        del here, history
        yield self.passed(f"{CLASS} answers")
