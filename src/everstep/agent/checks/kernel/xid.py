"""Judges XIDs and SXIDs in the kernel log: errors of NVIDIA's GPUs and of their switches.

What an XID means is in checks/xids.py, which NVML's events are judged by as well. Here is only
whose GPU it was, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.kernel import judging
from everstep.agent.checks.kernel.attribution import pci_address
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.agent.checks.xids import XidEvent, XidFinding, XidLimits, judge_xids
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

OFF_THE_BUS = 79
"""The XID of the driver's line that has no number."""


class XidCheck(Check[KernelLog, XidLimits]):
    """XIDs of the GPUs that the job uses."""

    name = "kernel.xid"
    source = "kernel"
    about = "XIDs of NVIDIA's driver: the kernel log"
    limits_type = XidLimits

    def judge(self, here: Here, history: History[KernelLog]) -> Iterable[Result]:
        del here
        log = history.now.sample
        lines = [line for line in log.lines if line.rule in {"xid", "gpu.bus"}]
        ours = [line for line in lines if address(line, log) in log.ours.pci]
        events = list(self._events(ours, history))
        fresh_s = judging.fresh(self.limits.fresh_s, history)
        limits = msgspec.structs.replace(self.limits, fresh_s=fresh_s)
        findings = judge_xids(events, history.now.at, limits)
        results = [self._in_time(finding, ours, history) for finding in findings]
        foreign = len(lines) - len(ours)
        if not results:
            also = f", {foreign} lines of others' GPUs" if foreign else ""
            results.append(self.passed(f"no XID in {fresh_s:.0f} s{also}"))
        return results

    def _events(self, lines: list[Line], history: History[KernelLog]) -> Iterator[XidEvent]:
        """On the clock of samples, which the log's clock drifts against."""
        log = history.now.sample
        for line in lines:
            yield XidEvent(
                at=history.now.at - judging.age(line, log),
                pci=address(line, log),
                code=int(line.names.get("code", OFF_THE_BUS)),
                text=line.names.get("rest", ""),
            )

    def _in_time(
        self, finding: XidFinding, lines: list[Line], history: History[KernelLog]
    ) -> Result:
        """As of this host, and weaker if it was before this machine's time here."""
        log, result = history.now.sample, finding.result(self)
        code = int(result.values.get("xid", 0))
        of_it = [line for line in lines if int(line.names.get("code", OFF_THE_BUS)) == code]
        old = all(judging.is_older_than_us(line, history) for line in of_it or lines)
        verdict, why = result.verdict, result.why
        if old:
            verdict = judging.WEAKER.get(verdict, verdict)
            why = f"{why}; {judging.when((of_it or lines)[-1], history)}"
        cause = result.cause
        if result.failed and not cause and verdict is not Verdict.USER:
            cause = judging.of_device(log, finding.pci)
        return msgspec.structs.replace(result, verdict=verdict, why=why, cause=cause)


def address(line: Line, log: KernelLog) -> str:
    """Of the GPU; newer drivers may name it by its UUID."""
    named = line.names.get("pci", "") or log.ours.uuids.get(line.names.get("uuid", ""), "")
    return pci_address(named)


class SxidLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of kernel.sxid."""

    fresh_s: Seconds = 600.0
    """Seconds for which a line counts."""
    often: int = 3
    """Errors that are not fatal within `often_within_s` before the machine is suspect: our choice,
    as one such error is corrected and harmless (fabric manager's user guide, appendix D)."""
    often_within_s: Seconds = 3600.0


ALWAYS_FATAL = frozenset({12_020, 22_003, 22_011, *range(23_001, 23_018)})
"""Whatever the line says: fabric manager's user guide, appendix D.7."""


class SxidCheck(Check[KernelLog, SxidLimits]):
    """Errors of the switches between the machine's GPUs: they concern all of them."""

    name = "kernel.sxid"
    source = "kernel"
    about = "SXIDs of NVSwitches: the kernel log"
    limits_type = SxidLimits

    def judge(self, here: Here, history: History[KernelLog]) -> Iterable[Result]:
        del here
        log = history.now.sample
        switches: dict[str, list[Line]] = {}
        for line in log.lines:
            if line.rule == "sxid" and pci_address(line.names.get("pci", "")) in log.ours.pci:
                switches.setdefault(pci_address(line.names["pci"]), []).append(line)
        results = [self._judge(pci, lines, history) for pci, lines in sorted(switches.items())]
        return results or [self.passed("no SXID")]

    def _judge(self, pci: str, lines: list[Line], history: History[KernelLog]) -> Result:
        """Of one switch."""
        log = history.now.sample
        item = f"NVSwitch {pci}"
        fatal = [line for line in lines if _is_fatal(line)]
        soft = [line for line in lines if _is_soft(line)]
        recent = [line for line in soft if judging.age(line, log) <= self.limits.often_within_s]
        fresh_s = judging.fresh(self.limits.fresh_s, history)
        if fatal and judging.age(fatal[-1], log) <= fresh_s:
            verdict, line, note = Verdict.EVICT, fatal[-1], "a fatal error of an NVSwitch"
        elif len(recent) >= self.limits.often:
            verdict, line = Verdict.SUSPECT, recent[-1]
            note = f"{len(recent)} errors of an NVSwitch in {self.limits.often_within_s:.0f} s"
        else:
            return self.passed(f"{len(lines)} SXIDs, none that counts", item)
        if judging.is_older_than_us(line, history):
            verdict = judging.WEAKER[verdict]
        return self.found(
            verdict,
            Category.GPU_UNAVAILABLE,
            f"{note}: {judging.quoted(line)}, {judging.when(line, history)}",
            "Reboot the machine, then test it.",
            item=item,
            cause=judging.of_device(log, pci),
            values={"sxid": float(line.names["code"])},
        )


def _is_fatal(line: Line) -> bool:
    """Lines of data follow each error; they say nothing of how grave it is."""
    said = line.names.get("rest", "")
    return said.startswith("Fatal") or (
        int(line.names["code"]) in ALWAYS_FATAL and not said.startswith(("Data", "Severity"))
    )


def _is_soft(line: Line) -> bool:
    return line.names.get("rest", "").startswith("Non-fatal") and not _is_fatal(line)
