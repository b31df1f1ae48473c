"""net.switch: the gateway, or an address that the job needs, no longer answers.

One result for all of them: a dead switch is one event, however many addresses lie behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.net.reach import Answer, Reach
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds


class SwitchLimits(Limits, frozen=True, kw_only=True):
    """When an address counts as gone."""

    misses: int = 2
    """Tries in a row without an answer. ByteRobust: a switch needs two before an alert."""
    settle_s: Seconds = 60.0
    """After a link came or went, nobody is blamed for so long: net.link tells that event, and a
    switch port may wait 30 s (spanning tree) before it forwards again."""


class SwitchCheck(Check[Reach, SwitchLimits]):
    """Only addresses that have answered before: a gateway may ignore strangers by intention."""

    name = "net.switch"
    source = "net.reach"
    about = "gateways and needed addresses that stopped answering (ping, TCP)"
    limits_type = SwitchLimits
    again_s = 30.0

    def judge(self, here: Here, history: History[Reach]) -> Iterator[Result]:
        del here
        now = history.now.sample
        if now.down:
            yield self.could_not_run(f"{', '.join(now.down)} has no link, which net.link judges")
            return
        if now.changed_ago_s is not None and now.changed_ago_s < self.limits.settle_s:
            yield self.could_not_run(f"a link changed {now.changed_ago_s:.0f} s ago")
            return
        silent = {
            name: answer
            for name, answer in now.answers.items()
            if answer.misses >= self.limits.misses and _ever(name, history)
        }
        if silent:
            yield self._silent(silent, now.answers)
            return
        yield self._answered(now.answers)

    def _answered(self, answers: Mapping[str, Answer]) -> Result:
        good = [name for name, answer in answers.items() if answer.answered]
        if good or not answers:
            return self.passed(f"{len(good)} of {len(answers)} addresses answer")
        name, answer = next(iter(answers.items()))
        if answer.ever:
            return self.passed(f"{name} did not answer once: {answer.why}")
        do = "Name an address that answers, if this machine must be able to reach something."
        return self.could_not_run(f"{name} has never answered: {answer.why}", do=do)

    def _silent(self, silent: Mapping[str, Answer], answers: Mapping[str, Answer]) -> Result:
        named = [name for name, answer in silent.items() if not answer.gateway]
        gateways = [name for name in silent if name not in named]
        others = any(answer.answered for answer in answers.values())
        first = (gateways or named)[0]
        whose = "gateway" if gateways else "address"
        why = (
            f"{', '.join(silent)} did not answer {silent[first].misses} times in a row: "
            f"{silent[first].why}"
        )
        # A gateway that is silent while what is needed answers may only limit its pings.
        counts = Counts.NEVER if others and not named else Counts.TWICE
        return self.found(
            Verdict.WARN,
            Category.INFINIBAND_ERROR,
            why,
            f"See whether other machines reach {whose} {first}: if not, repair the switch, else "
            "the network card or cable of this one.",
            counts=counts,
            cause=f"{whose} {first}",
        )


def _ever(name: str, history: History[Reach]) -> bool:
    """Whether it has answered at any time that is known."""
    if history.now.sample.answers[name].ever:
        return True
    earlier = (history.first, *history.past)
    return any(name in each.sample.answers and each.sample.answers[name].ever for each in earlier)
