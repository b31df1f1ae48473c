"""XIDs that NVML reports: what an ordinary user sees of the driver's part of the kernel log."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.gpu.samples import XidSample
from everstep.agent.checks.xids import XidLimits, judge_xids, table
from everstep.health import Result


class XidByNvml(Check[XidSample, XidLimits]):
    """One result per GPU with a recent XID; else one for the machine."""

    name = "gpu.xid"
    source = "nvml-events"
    about = "no XIDs, as NVML's events report them, by NVIDIA's classes"
    limits_type = XidLimits

    def judge(self, here: Here, history: History[XidSample]) -> Iterable[Result]:
        del here
        now = history.now
        found = judge_xids(now.sample.events, now.at, self.limits, now.sample.driver)
        yield from (finding.result(self) for finding in found)
        if any(finding.item == "" for finding in found):
            return
        if now.sample.starting_s:
            yield self.could_not_run("the GPUs are starting")
        else:
            seen = len(now.sample.events)
            yield self.passed(f"watching; {seen} XIDs in a day (table of {table().version})")
