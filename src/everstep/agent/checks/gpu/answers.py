"""Whether each GPU answers a short question, every two seconds: the quickest sign of a lost one.

That the driver hangs is found without a sample: by XidSource.unanswered, under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.library import hung
from everstep.agent.checks.gpu.samples import Code, XidSample
from everstep.agent.checks.xids import gpu_item
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

FAULTS = {
    Code.GPU_IS_LOST: ("the GPU is lost", "Reboot the machine; if it is so again, ask the vendor."),
    Code.RESET_REQUIRED: ("the GPU must be reset", "Reset the GPU, then test the machine."),
}


class StartLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.answers. A start is no silence, and may still be one that never ends."""

    start_s: Seconds = 120.0
    """Seconds. Eight cold GPUs without persistence mode take 10 to 30, more on a busy host."""
    start_again_s: Seconds = 10.0
    """Seconds if the GPUs answered shortly before and ranks run here: then they are warm, and a
    start takes one."""


class Answers(Check[XidSample, StartLimits]):
    """Codes of that question; other codes are judged with the large sample."""

    name = "gpu.answers"
    source = "nvml-events"
    about = "the driver and every GPU answer within seconds (NVML, every 2 s)"
    limits_type = StartLimits
    keep = 12

    def judge(self, here: Here, history: History[XidSample]) -> Iterable[Result]:
        now = history.now.sample
        if now.starting_s:
            warm = bool(here.pids) and any(each.sample.answers for each in history.past)
            most = self.limits.start_again_s if warm else self.limits.start_s
            if now.starting_s >= most:
                yield hung(self.name, now.driver, now.starting_s)
            else:
                yield self.could_not_run(f"the GPUs have been starting for {now.starting_s:.0f} s")
            return
        faults = {pci: code for pci, code in now.answers.items() if code in set(FAULTS)}
        for pci, code in sorted(faults.items()):
            why, do = FAULTS[Code(code)]
            yield self.found(
                Verdict.EVICT,
                Category.GPU_UNAVAILABLE,
                f"{why} (NVML code {code})",
                do,
                item=gpu_item(pci),
            )
        yield self.passed(f"{len(now.answers) - len(faults)} GPUs answer")
