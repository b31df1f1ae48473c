"""Whether each GPU answers a short question, every two seconds: the quickest sign of a lost one.

That the driver hangs is found without a sample: by XidSource.unanswered, under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.gpu.samples import Code, XidSample
from everstep.agent.checks.gpu.starting import StartLimits, judge_start
from everstep.agent.checks.xids import gpu_item
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

FAULTS = {
    Code.GPU_IS_LOST: ("the GPU is lost", "Reboot the machine; if it is so again, ask the vendor."),
    Code.RESET_REQUIRED: ("the GPU must be reset", "Reset the GPU, then test the machine."),
}


class Answers(Check[XidSample, StartLimits]):
    """Codes of that question; other codes are judged with the large sample."""

    name = "gpu.answers"
    source = "nvml-events"
    about = "the driver and every GPU answer within seconds (NVML, every 2 s)"
    limits_type = StartLimits

    def judge(self, here: Here, history: History[XidSample]) -> Iterable[Result]:
        now = history.now.sample
        if now.starting_s:
            hangs = judge_start(self.name, self.limits, here, now.starting_s, now.driver)
            why = f"the GPUs have been starting for {now.starting_s:.0f} s"
            yield hangs or self.could_not_run(why)
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
