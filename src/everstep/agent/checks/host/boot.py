"""Check host.boot: the machine was started again while the job ran.

History ends with a boot, so this needs `Here.boot_id` from before: from the machine's first report
to the controller. An agent that asks its own kernel for it sees no change, ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_proc import ProcSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class Boot(Check[ProcSample, Limits]):
    """Nobody restarts a machine of a running job on purpose, and its ranks are gone."""

    name: ClassVar[str] = "host.boot"
    source: ClassVar[str] = "proc"
    about: ClassVar[str] = "the machine was started again while the job ran (boot id)"

    def judge(self, here: Here, history: History[ProcSample]) -> Iterable[Result]:
        now = history.now.sample.boot_id
        if not now:
            yield self.could_not_run("the id of this boot cannot be read")
        elif here.boot_id in {"", now}:
            yield self.passed(f"this is still boot {now}")
        else:
            yield self.found(
                Verdict.EVICT,
                Category.OS_KERNEL_PANIC,
                f"the machine was started again: this is boot {now}, it was {here.boot_id}",
                "Find out why: /sys/fs/pstore, the BMC's event log (ipmitool sel elist), last -x.",
            )
