"""Judges what the kernel's OOM killer did: whose memory ran out decides whose fault it is."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.kernel import judging
from everstep.agent.checks.kernel.attribution import cgroup_is_ours, pid_is_ours
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

WHY, KILLED = "oom.why", "oom.killed"


class OomLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of kernel.oom."""

    fresh_s: Seconds = 600.0
    """Seconds for which a kill counts. The ranks' own ends tell of it as well; this says why."""


class OomCheck(Check[KernelLog, OomLimits]):
    """Processes that the kernel killed for memory."""

    name = "kernel.oom"
    source = "kernel"
    about = "processes that the kernel killed because memory ran out: the kernel log"
    limits_type = OomLimits

    def judge(self, here: Here, history: History[KernelLog]) -> Iterable[Result]:
        del here
        log = history.now.sample
        fresh_s = judging.fresh(self.limits.fresh_s, history)
        kills: dict[str, list[Line]] = {}
        for line in log.lines:
            if line.rule in {WHY, KILLED} and judging.age(line, log) <= fresh_s:
                kills.setdefault(line.names.get("pid", ""), []).append(line)
        results = [self._judge(pid, lines, history) for pid, lines in kills.items()]
        if not any(result.failed for result in results):
            results.append(self.passed(f"{len(kills)} kills, none of them the job's"))
        return results

    def _judge(self, pid: str, lines: list[Line], history: History[KernelLog]) -> Result:
        """Of one process that was killed."""
        log = history.now.sample
        names = {name: value for line in lines for name, value in line.names.items()}
        limited = names.get("constraint") == "MEMCG" or names.get("where", "").startswith("Memory")
        ours = pid_is_ours(pid, log.ours) or cgroup_is_ours(names.get("cgroup", ""), log.ours)
        item = f"pid {pid}" if pid.isdecimal() else "a process of another user"
        said = f"{_process(names)}, {judging.when(lines[-1], history)}"
        if any(judging.is_older_than_us(line, history) for line in lines):
            return self.passed(said, item)
        if ours:
            where = f"cgroup {names.get('limited', '')}".strip() if limited else "the machine"
            return self.found(
                Verdict.USER,
                Category.CPU_OOM,
                f"the memory of {where} ran out and the kernel killed the job's {said}",
                "Give the job more memory, or let it use less: loader workers, pinned buffers.",
                item=item,
            )
        if limited:
            return self.passed(f"a limit of others: {said}", item)
        return self.found(
            Verdict.SUSPECT,
            Category.CPU_OOM,
            f"the machine's memory ran out and the kernel killed {said}, which is not the job's",
            "Find out who else runs on the machine, and end it.",
            item=item,
            cause=judging.of_boot(log),
        )


def _process(names: dict[str, str]) -> str:
    """Who was killed, as far as it is known."""
    held = names.get("anon_kb", "")
    size = f" with {int(held) / 1024:.0f} MiB" if held.isdecimal() else ""
    return f"process {names.get('pid', '?')} ({names.get('comm', 'of another user')}){size}"
