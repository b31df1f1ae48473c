"""How many standbys a job keeps: as many as a day will need, and rarely more.

Machines fail one by one, so the number that fails in a day is binomial. The pool is its 99th
percentile (ByteRobust, 6.2): 2, 2, 3 and 4 standbys for 128, 256, 512 and 1024 machines. The rate
is learned from the job's own history; before there is any, it is one failure in 800 days of a
machine. Asked by request_machines of rules.py, by the cluster for the machines that a job begins
with, and by status views. A pool that has become too large is left as it is: others may need it
tomorrow, and a standby is no harm.
"""

from __future__ import annotations

import math

from everstep.core.state import State
from everstep.model import JobSpec, Seconds, Value

PRIOR_FAILURES = 1.0
PRIOR_MACHINE_DAYS = 800.0
"""What is believed before the job has told anything: 0.00125 failures per machine and day. It
weighs as much as 800 days of one machine: less than a day of a job of a thousand."""
ENOUGH = 0.99
"""Share of days on which the pool does."""
DAY_S: Seconds = 86400.0


class Pool(Value, frozen=True, kw_only=True):
    """How many standbys are wanted, and why."""

    wanted: int
    rate: float
    """Failures per machine and day."""
    why: str
    """A clause for people; empty if the number was given."""


def wanted_standbys(state: State, now: Seconds) -> int:
    """As many as the job asks for, or as its history says."""
    return pool(state, now).wanted


def pool(state: State, now: Seconds) -> Pool:
    """The same, with its reason."""
    spec = state.spec
    assert spec is not None
    rate = failure_rate(_failures(state), _machine_days(state, now))
    if not spec.auto_standbys:
        return Pool(wanted=spec.standbys, rate=rate, why="")
    wanted = max(1, spec.standbys, percentile(spec.nnodes, rate))
    why = f"{ENOUGH:.0%} of days need no more at {rate:.2g} failures per machine and day"
    return Pool(wanted=wanted, rate=rate, why=why)


def standbys_at_first(spec: JobSpec) -> int:
    """What a job begins with, before it has told anything of itself."""
    if not spec.auto_standbys:
        return spec.standbys
    return max(1, spec.standbys, percentile(spec.nnodes, failure_rate(0, 0.0)))


def failure_rate(failures: int, machine_days: float) -> float:
    """Failures per machine and day."""
    return (PRIOR_FAILURES + failures) / (PRIOR_MACHINE_DAYS + machine_days)


def percentile(machines: int, rate: float) -> int:
    """The smallest number that a day's failures exceed on at most one day in a hundred.

    Each term of the binomial from the one before. In logarithms: the first one is no number that a
    float can hold if there are many machines and they often fail.
    """
    rate = min(max(rate, 1e-12), 1.0 - 1e-12)
    odds = math.log(rate) - math.log1p(-rate)
    log_term, total = machines * math.log1p(-rate), 0.0
    for count in range(machines):
        total += math.exp(log_term)
        if total >= ENOUGH:
            return count
        log_term += odds + math.log((machines - count) / (count + 1))
    return machines


def _failures(state: State) -> int:
    """Machines that went and were not found sound since."""
    return sum(record.guilty is not False for record in state.evictions)


def _machine_days(state: State, now: Seconds) -> float:
    """Of the time since the submission: waiting machines fail as well."""
    segments = state.account.segments
    since = segments[0].since if segments else now
    ended = state.account.ended_at
    return state.job.nnodes * max(0.0, (now if ended is None else ended) - since) / DAY_S
