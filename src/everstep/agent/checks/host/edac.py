"""Check host.edac: main memory has errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from msgspec.structs import replace

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import growth
from everstep.agent.checks.host.source_edac import EdacSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class EdacLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.edac."""

    corrected: int = 9
    """In one hour, on one controller: more is suspect (LBNL's node health check allows nine)."""
    uncorrected: int = 0
    """In one hour, on one controller: more evicts. What was read is lost, and nobody knows whose
    it was."""


class MemoryErrors(Check[EdacSample, EdacLimits]):
    """Compares counts: what happened before the job is not its business."""

    name: ClassVar[str] = "host.edac"
    source: ClassVar[str] = "edac"
    about: ClassVar[str] = "corrected and uncorrected errors of main memory (EDAC)"
    limits_type: ClassVar[type[Limits]] = EdacLimits
    keep: ClassVar[int] = 60

    def judge(self, here: Here, history: History[EdacSample]) -> Iterable[Result]:
        stamped = history.since(3600.0)
        for name in history.now.sample.controllers:
            counts = [each.sample.controllers.get(name) for each in stamped]
            result = self._judge(
                name,
                growth(each.corrected for each in counts if each),
                growth(each.uncorrected for each in counts if each),
            )
            shared = result.failed and here.boot_id  # all machines on this kernel have this memory
            yield replace(result, cause=f"boot {here.boot_id}") if shared else result

    def _judge(self, name: str, corrected: int, uncorrected: int) -> Result:
        values = {"corrected": float(corrected), "uncorrected": float(uncorrected)}
        why = f"{corrected} corrected and {uncorrected} uncorrected errors in the last hour"
        if uncorrected > self.limits.uncorrected:
            verdict = Verdict.EVICT
        elif corrected > self.limits.corrected:
            verdict = Verdict.SUSPECT
        else:
            return self.passed(why, item=name, **values)
        return self.found(
            verdict,
            Category.OS_KERNEL_PANIC,
            f"memory controller {name} had {why}",
            f"Find the module (edac-util -v, {name}/dimm*/dimm_label) and have it changed.",
            item=name,
            values=values,
        )
