"""Judges lines of the kernel log by the rules of kernel.toml: one result per rule and thing."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.kernel import judging
from everstep.agent.checks.kernel.attribution import is_ours, same_thing, thing_of
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.agent.checks.kernel.table import About, KernelRule, own_table
from everstep.diagnosis.words import Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds

AT_ONCE_S: Seconds = 10.0
"""A line that is read later, because the log could not be read for a while, is no strike of its
own: what it tells of shows elsewhere as well, where it was counted when it happened."""


class LogLimits(Limits, frozen=True, kw_only=True):
    """What a site may change about the rules without another table."""

    off_rules: tuple[str, ...] = ()
    """Ids of rules that say nothing here: the switch for one that is wrong somewhere."""
    verdicts: dict[str, Verdict] = {}
    """Id of a rule -> the site's own verdict: fleets differ about what is grave."""


class KernelLogCheck(Check[KernelLog, LogLimits]):
    """Lines of drivers, disks, file systems, memory and the kernel itself."""

    name = "kernel.log"
    source = "kernel"
    about = "what drivers and the kernel report: /dev/kmsg, or the node service"
    limits_type = LogLimits

    def judge(self, here: Here, history: History[KernelLog]) -> Iterable[Result]:
        del here
        log = history.now.sample
        table = own_table()
        groups: dict[tuple[int, str], list[Line]] = {}
        for line in log.lines:
            rule = table.of.get(line.rule)
            if rule is None or rule.check != self.name or rule.id in self.limits.off_rules:
                continue
            groups.setdefault((table.place[rule.id], thing_of(rule, line.names)), []).append(line)
        fresh = [
            (table.rules[place], lines)
            for (place, _), lines in sorted(groups.items())
            if judging.age(lines[-1], log) <= judging.fresh(table.rules[place].fresh_s, history)
        ]
        old = len(groups) - len(fresh)
        all_told = self.passed(f"{log.read} lines read, {old} findings are too old to count")
        return [all_told, *(self._judge(rule, lines, history) for rule, lines in fresh)]

    def _judge(self, rule: KernelRule, lines: list[Line], history: History[KernelLog]) -> Result:
        """Of one rule about one thing."""
        log, newest = history.now.sample, lines[-1]
        item = f"{thing_of(rule, newest.names)} {rule.id}".strip()
        why = f"{judging.quoted(newest)}, {judging.when(newest, history)}"
        if not is_ours(rule, newest.names, log.ours):
            return self.passed(f"names nothing that the job uses: {why}", item)
        verdict, note = self._weigh(rule, lines, log)
        if judging.is_older_than_us(newest, history):
            verdict = judging.WEAKER.get(verdict, verdict)
        if verdict is Verdict.INFO:
            return self.passed(f"{note}: {why}", item)
        late = rule.counts is Counts.TWICE and judging.age(newest, log) > AT_ONCE_S
        return self.found(
            verdict,
            rule.category,
            f"{rule.why}{note}: {why}",
            rule.do,
            item=item,
            counts=Counts.NEVER if late else rule.counts,
            cause=_cause(rule, newest, log),
            values={"lines": float(len(lines))},
        )

    def _weigh(self, rule: KernelRule, lines: list[Line], log: KernelLog) -> tuple[Verdict, str]:
        """The verdict before age counts, and what to add to the reason."""
        verdict = self.limits.verdicts.get(rule.id, rule.verdict)
        if rule.healed_by:
            return _unless_healed(rule, verdict, lines, log)
        if rule.n == 1:
            return verdict, ""
        recent = [line for line in lines if lines[-1].at - line.at <= rule.within_s]
        count = judging.times(recent)
        note = f" ({count} in {rule.within_s:.0f} s, {rule.n} count)"
        return (verdict if count >= rule.n else rule.fewer), note


def _unless_healed(
    rule: KernelRule, verdict: Verdict, lines: list[Line], log: KernelLog
) -> tuple[Verdict, str]:
    """Nothing if it is over; a warning while it may still heal."""
    healing = [
        line.seq
        for line in log.lines
        if line.rule == rule.healed_by and any(same_thing(rule, line, other) for other in lines)
    ]
    over = max(healing, default=-1)
    open_since = next((line for line in lines if line.seq > over), None)
    if open_since is None:
        return Verdict.INFO, "over"
    for_s = judging.age(open_since, log)
    note = f" for {for_s:.0f} s ({rule.patience_s:.0f} count)"
    return (verdict if for_s >= rule.patience_s else Verdict.WARN), note


def _cause(rule: KernelRule, line: Line, log: KernelLog) -> str:
    """What other machines with the same result have in common with this one."""
    if rule.about is About.MOUNT:
        server = line.names.get("server", "")
        return f"{rule.id.partition('.')[0]} server {server}"
    if rule.about in {About.PID, About.CGROUP}:
        return ""
    return judging.of_device(log, thing_of(rule, line.names))
