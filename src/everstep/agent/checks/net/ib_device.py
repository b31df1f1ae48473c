"""ib.device: an RDMA device that was here is gone."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.ports import ACTIVE, Ports
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class DeviceCheck(Check[Ports, PortLimits]):
    """A NIC crash: the driver gave the card up. Whatever the job had open on it is lost."""

    name = "ib.device"
    source = "infiniband"
    about = "RDMA devices that are gone (/sys/class/infiniband)"
    limits_type = PortLimits

    def judge(self, here: Here, history: History[Ports]) -> Iterator[Result]:
        now, first = history.now.sample, history.first.sample
        devices = sorted({*now.devices, *now.met, *first.devices})
        for device in devices:
            if ignored(device, here, self.limits):
                continue
            if device in now.devices:
                yield self.passed(f"{device} is here", device)
                continue
            active = now.met.get(device, False) or any(
                name.startswith(f"{device}/") and port.state == ACTIVE
                for name, port in first.ports.items()
            )
            lent = device in (*now.lent, *first.lent) and device not in here.hcas
            yield self.found(
                Verdict.EVICT if active and not lent else Verdict.WARN,
                Category.INFINIBAND_ERROR,
                f"{device} was here and is gone" + ("" if active else "; it was never active"),
                "Look in the kernel log for why its driver let go of it; reboot, then replace it.",
                item=device,
            )
