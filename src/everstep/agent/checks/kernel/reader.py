"""Says when the kernel log could not be read as a whole: what is missing may be what matters."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.kernel.lines import KernelLog
from everstep.health import Result


class ReaderCheck(Check[KernelLog, Limits]):
    """Gaps between records, storms and garbage."""

    name = "kernel.reader"
    source = "kernel"
    about = "whether the kernel log was read without gaps"

    def judge(self, here: Here, history: History[KernelLog]) -> Iterable[Result]:
        del here
        now = history.now.sample
        before = history.past[-1].sample if history.past else None
        missing, garbage = _since(before, now)
        values = {"missing": float(missing), "garbage": float(garbage)}
        if missing or garbage:
            why = f"{missing} records of the kernel log are missing, {garbage} are unreadable"
            do = "Find out who floods it: dmesg; a larger log_buf_len= of the kernel helps."
            return [_with(self.could_not_run(why, do=do), values)]
        return [self.passed(f"record {now.seq} read by {now.by}", "", **values)]


def _since(before: KernelLog | None, now: KernelLog) -> tuple[int, int]:
    """Records that are missing, and those that could not be read, since the sample before.

    Another reader counts anew, so what lies between them is told by the numbers of records. The
    first sample says nothing: what was overwritten before it was nobody's.
    """
    if before is None:
        return 0, now.garbage
    if before.opened == now.opened:
        lost = now.lost - before.lost
        unread = now.garbage - before.garbage
        return max(0, lost), max(0, unread)
    gap = now.oldest - before.seq - 1 if now.oldest >= 0 and before.seq >= 0 else 0
    return max(0, gap), now.garbage


def _with(result: Result, values: dict[str, float]) -> Result:
    return Result(
        check=result.check, verdict=result.verdict, why=result.why, do=result.do, values=values
    )
