"""Judges what a kernel left that crashed: files in pstore, which survive the reboot."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.kernel import judging
from everstep.agent.checks.kernel.lines import KernelLog
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class PanicCheck(Check[KernelLog, Limits]):
    """Crash dumps of this machine's kernel."""

    name = "kernel.panic"
    source = "kernel"
    about = "dumps that a crashed kernel left: /sys/fs/pstore, as root or by the node service"

    def judge(self, here: Here, history: History[KernelLog]) -> Iterable[Result]:
        del here
        log = history.now.sample
        if log.pstore is None:
            why = "only root may look into /sys/fs/pstore, or this machine has none"
            return [self.could_not_run(why, do="Start the node service: everstep check --serve.")]
        dumps = [name for name in log.pstore if name.startswith("dmesg-")]
        before = history.first.sample.pstore
        new = [] if before is None else [name for name in dumps if name not in before]
        if new:
            return [
                self.found(
                    Verdict.SUSPECT,
                    Category.OS_KERNEL_PANIC,
                    f"the kernel crashed in part and left {len(new)} dumps: {new[0]}",
                    "Reboot the machine at the next stop, then test it.",
                    cause=judging.of_boot(log),
                )
            ]
        if dumps:
            return [
                self.found(
                    Verdict.WARN,
                    Category.OS_KERNEL_PANIC,
                    f"the kernel left {len(dumps)} dumps before this job: {dumps[0]}",
                    "Read them and remove them; if nobody knows of a crash, test the machine.",
                    cause=judging.of_boot(log),
                )
            ]
        return [self.passed("no crash dumps")]
