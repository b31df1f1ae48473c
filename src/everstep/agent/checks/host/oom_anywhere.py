"""Check host.oom_anywhere: the kernel ended processes of this machine for want of memory.

Whether they were the job's own is host.oom.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import growth
from everstep.agent.checks.host.source_proc import ProcSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class OomAnywhere(Check[ProcSample, Limits]):
    """Never more than a warning: in most cases somebody else's container reached its limit."""

    name: ClassVar[str] = "host.oom_anywhere"
    source: ClassVar[str] = "proc"
    about: ClassVar[str] = "the OOM killer was at work on this machine (/proc/vmstat)"

    def judge(self, here: Here, history: History[ProcSample]) -> Iterable[Result]:
        del here
        if history.now.sample.oom_kills is None:
            yield self.could_not_run("the kernel does not count kills for want of memory")
            return
        stamped = (*history.past[-1:], history.now)
        kills = growth(each.sample.oom_kills for each in stamped)
        if not kills:
            yield self.passed("nothing was ended for want of memory")
            return
        yield self.found(
            Verdict.WARN,
            Category.CPU_OOM,
            f"the kernel ended {kills} processes of this machine for want of memory",
            "Look who (dmesg | grep -i oom): a system process that is gone may be missed later.",
            values={"kills": float(kills)},
        )
