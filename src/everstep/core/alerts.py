"""What checks say of machines: kept while it holds, and counted.

observe.py has alerts noted here. Asked by evicting.py for machines that something speaks against,
by suspects.py for doubts that weigh when something else failed, by status views for what to show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from everstep.core.slowdown import slowed
from everstep.core.state import Flood, Machine, Noted, State, Strike
from everstep.diagnosis.words import Category, Verdict
from everstep.events import AlertCleared, AlertRaised, MachineJoined
from everstep.health import Alert, Counts, Result
from everstep.model import MachineId, Seconds, Value

ALERTS_MAX = 64
"""Kept of one machine: a flood of items says no more than the gravest of them."""
STRIKES_MAX = 32
"""Kept of one machine."""
SAME_S: Seconds = 5.0
"""An occurrence that is told again may seem this much younger: messages take their time."""
BY_ITSELF = "agent"
"""The source of a machine's own checks."""
BY_US = "controller"
"""The source of what no check of a machine can say, since its memory ended with its boot."""
OWN_SOURCES = frozenset({BY_ITSELF, "node service"})
"""Who speaks of a machine from within it."""
RESERVED = OWN_SOURCES | {BY_US}
"""Names that nobody else may speak under."""
BOOTED_ANEW = "boot id"
"""The check of what an agent says when it joins again."""
BOOT = "boot "
"""Begins the cause of what is true of a kernel; after its id may follow a part of its host."""
JUDGED_MAX = 20_000
"""Machines with alerts that are judged within one second. When a storage of ten thousand machines
goes, all of them speak at once: then once more at the end of the second."""
_WEIGHT = {Verdict.ERROR: 0, Verdict.WARN: 1, Verdict.USER: 2, Verdict.JOB: 3, Verdict.SUSPECT: 4}
"""Of what there is no room for, the lightest is dropped."""
_HEAVIEST = 5
_TOLERATED = frozenset({Verdict.WARN, Verdict.SUSPECT})
"""Verdicts that become more with time or a slow-down. Job and user stay what they are."""


class Accusation(Value, frozen=True, kw_only=True):
    """Something that is enough to evict a machine for, if the guards agree."""

    machine: MachineId
    at: Seconds
    """When it became that."""
    event: int
    """Number of the event that told it."""
    why: str
    cause: str = ""
    """What other machines may share with it (health.Result)."""
    source: str = BY_ITSELF
    struck: bool = False
    """It is the second occurrence of something that is tolerated once."""


# --- taking note ---------------------------------------------------------------------------------


def alert_raised(state: State, event: AlertRaised, now: Seconds) -> None:
    """One more alert, or the same one again: what is told twice has happened once."""
    machine, alert = state.machines.get(event.machine), event.alert
    if machine is None or alert.result.verdict is Verdict.INFO:
        return
    _forget_old(state, machine, now)
    at = now - max(0.0, alert.age_s)
    known = _find(machine, alert.source, alert.result.check, alert.result.item)
    if known is not None and not _is_news(known, alert, at):
        return
    if usable(machine):
        state.alerted[event.machine] = None
    if known is None or known.cleared_at is not None or not known.acquitted:
        _strike(state, machine, Strike(at=at, event=state.seq, alert=alert))
    if known is None:
        _add(machine, Noted(alert=alert, event=state.seq, since=at, at=at))
        return
    if known.cleared_at is not None:
        known.since, known.cleared_at, known.told, known.acquitted = at, None, False, False
    known.alert, known.event, known.at = alert, state.seq, max(known.at, at)


def count_event(state: State, now: Seconds) -> None:
    """Something was told, whatever it is: rules are asked."""
    second, flood = math.floor(now), state.flood
    events = flood.events + 1 if flood.second == second else 1
    state.flood = Flood(second=second, events=events)


def flooded_until(state: State) -> Seconds:
    """Until when nobody is judged by checks alone, since so much is being said; long ago: go on."""
    flood = state.flood
    many = flood.events > 1 and flood.events * len(state.alerted) > JUDGED_MAX
    return flood.second + 1.0 if many else 0.0


def _is_news(known: Noted, alert: Alert, at: Seconds) -> bool:
    before, after = known.alert.result, alert.result
    if after.verdict is Verdict.ERROR:
        return before.verdict is Verdict.ERROR or known.cleared_at is not None
    same = (before.verdict, before.counts) == (after.verdict, after.counts)
    return not same or at > known.at + SAME_S


def alert_cleared(state: State, event: AlertCleared, now: Seconds) -> None:
    """It holds no more; that it was there still counts for a while."""
    machine = state.machines.get(event.machine)
    known = machine and _find(machine, event.source, event.check, event.item)
    if known and known.cleared_at is None:
        known.cleared_at = now


def machine_came(state: State, machine: Machine, event: MachineJoined, now: Seconds) -> None:
    """What a machine said of itself before it was booted anew is over; that it was accuses it.

    What its new agent says may have come before this: that has just occurred.
    """
    if machine.boot_id and event.boot_id and machine.boot_id != event.boot_id:
        for noted in machine.alerts:
            own = noted.alert.source in OWN_SOURCES and noted.at < now - SAME_S
            if own and noted.cleared_at is None:
                noted.cleared_at = now
        if machine.node_rank is not None:
            alert_raised(state, _booted_anew(machine, event), now)
    machine.boot_id = event.boot_id or machine.boot_id
    machine.units = event.units
    _forget_old(state, machine, now)


def _booted_anew(machine: Machine, event: MachineJoined) -> AlertRaised:
    """Nobody boots a machine of a running job on purpose: a panic, its power, its watchdog did."""
    result = Result(
        check=BOOTED_ANEW,
        verdict=Verdict.EVICT,
        category=Category.OS_KERNEL_PANIC,
        why=f"it was booted anew while it had ranks: this is boot {event.boot_id}, it was"
        f" {machine.boot_id}",
        do="Find out why: /sys/fs/pstore, the event log of its BMC (ipmitool sel elist), last -x.",
    )
    return AlertRaised(machine=machine.machine, alert=Alert(result=result, source=BY_US))


def proven(state: State, now: Seconds) -> None:
    """Training goes on with machines that were booted anew: with them there is nothing wrong."""
    for name in state.alerted:
        machine = state.machines[name]
        known = _find(machine, BY_US, BOOTED_ANEW, "")
        if known is not None and known.cleared_at is None:
            known.cleared_at = now


def _find(machine: Machine, source: str, check: str, item: str) -> Noted | None:
    for noted in machine.alerts:
        result = noted.alert.result
        if (result.check, result.item, noted.alert.source) == (check, item, source):
            return noted
    return None


def _add(machine: Machine, noted: Noted) -> None:
    if len(machine.alerts) >= ALERTS_MAX:
        lightest = min(machine.alerts, key=_weight)
        if _weight(lightest) >= _weight(noted):
            return
        machine.alerts.remove(lightest)
    machine.alerts.append(noted)


def _weight(noted: Noted) -> tuple[bool, int]:
    verdict = noted.alert.result.verdict
    return noted.cleared_at is None, _WEIGHT.get(verdict, _HEAVIEST)


def _strike(state: State, machine: Machine, strike: Strike) -> None:
    """What shows on several items, or is looked at again within seconds, is one strike."""
    result, policy = strike.alert.result, state.job.policy
    if result.counts is not Counts.TWICE or result.verdict not in _TOLERATED:
        return
    near = (
        abs(other.at - strike.at) < policy.strikes_apart_s
        for other in machine.strikes
        if other.alert.source == strike.alert.source
    )
    if not any(near):
        machine.strikes = [*machine.strikes, strike][-STRIKES_MAX:]


def _forget_old(state: State, machine: Machine, now: Seconds) -> None:
    policy = state.job.policy
    kept_since = now - max(policy.alert_counts_s, policy.accusers_within_s)
    machine.alerts = [
        noted
        for noted in machine.alerts
        if noted.cleared_at is None or noted.cleared_at > kept_since
    ]
    # The guards ask who was accused lately, and that takes strikes of before.
    oldest = now - policy.strikes_within_s - policy.accusers_within_s
    machine.strikes = [strike for strike in machine.strikes if strike.at > oldest]
    if not machine.alerts and not machine.strikes:
        state.alerted.pop(machine.machine, None)


# --- what speaks against whom --------------------------------------------------------------------


def usable(machine: Machine) -> bool:
    """Whether it could be in the job, or is."""
    return not machine.evicted and not machine.released and not machine.lost


def accusations(state: State, now: Seconds, decided_at: Seconds | None = None) -> list[Accusation]:
    """What is enough to evict machines for, the oldest first; maybe several of one machine.

    `decided_at`: when ranks were stopped for it. What was enough then is enough now, although it
    may be over: a decision is not taken back because stopping took a while.
    """
    since = now if decided_at is None else min(now, decided_at)
    slow = slowed(state, since - state.job.policy.slowed_within_s)
    found: list[Accusation] = []
    for name in state.alerted:
        machine = state.machines[name]
        for noted in machine.alerts:
            over = noted.cleared_at
            if over is None or (decided_at is not None and over >= decided_at):
                found += _against(state, machine, noted, slow)
        if machine.strikes:
            found += _struck_twice(state, machine, since)
    return sorted(found, key=lambda accusation: accusation.at)


def _against(
    state: State, machine: Machine, noted: Noted, slow: tuple[Seconds, str] | None
) -> Iterator[Accusation]:
    result = noted.alert.result
    if result.verdict is Verdict.EVICT:
        yield _accusation(state, machine, noted, noted.since, sentence(noted.alert))
    elif slow and result.counts is Counts.WITH_SLOWDOWN and result.verdict in _TOLERATED:
        at = max(noted.since, slow[0])
        yield _accusation(state, machine, noted, at, f"{sentence(noted.alert)}, and {slow[1]}")


def _struck_twice(state: State, machine: Machine, since: Seconds) -> Iterator[Accusation]:
    """By one source: two of them tell of one occurrence at different times."""
    within_s = state.job.policy.strikes_within_s
    former: dict[str, Seconds] = {}
    for strike in sorted(machine.strikes, key=lambda strike: strike.at):
        if strike.at <= since - within_s:
            continue
        apart_s = strike.at - former.get(strike.alert.source, float("-inf"))
        if apart_s <= within_s:
            why = f"{sentence(strike.alert)}, for the second time in {apart_s:.0f} s"
            yield _accusation(state, machine, strike, strike.at, why)
            return
        former[strike.alert.source] = strike.at


def _accusation(
    state: State, machine: Machine, told: Noted | Strike, at: Seconds, why: str
) -> Accusation:
    return Accusation(
        machine=machine.machine,
        at=at,
        event=told.event,
        why=why,
        cause=cause_of(state, machine, told.alert),
        source=told.alert.source,
        struck=isinstance(told, Strike),
    )


def cause_of(state: State, machine: Machine, alert: Alert) -> str:
    """What others may share. Stand-ins share a host: what one sees of it, all of them will see."""
    result = alert.result
    if result.cause or not state.job.local or alert.source not in OWN_SOURCES:
        return result.cause
    return f"{BOOT}{machine.boot_id} {result.item or f'what {result.check} looks at'}"


def sentence(alert: Alert) -> str:
    """One clause for people: who says what of what."""
    result = alert.result
    by = "" if alert.source == BY_ITSELF else f" ({alert.source})"
    return f"{result.check}{by} says{f' of {result.item}' if result.item else ''}: {result.why}"


def struck_lately(state: State, now: Seconds) -> set[MachineId]:
    """Machines to which something happened that is tolerated once."""
    since = now - state.job.policy.strikes_within_s
    return {
        name
        for name in state.alerted
        if any(strike.at > since for strike in state.machines[name].strikes)
    }


def doubts(state: State, machine: Machine, now: Seconds) -> list[Noted]:
    """What is not enough to evict it, but speaks against it, or did until a while ago."""
    since = now - state.job.policy.alert_counts_s
    return [
        noted
        for noted in machine.alerts
        if noted.alert.result.verdict in (Verdict.SUSPECT, Verdict.EVICT)
        and (noted.cleared_at is None or noted.cleared_at > since)
    ]


def of_whole_job(state: State) -> list[Noted]:
    """What holds and is no machine's fault: people are told of it."""
    return [
        noted
        for name in state.alerted
        for noted in state.machines[name].alerts
        if noted.alert.result.verdict is Verdict.JOB and noted.cleared_at is None
    ]


def matter(noted: Noted) -> str:
    """What people are told of once, however many machines say it."""
    result = noted.alert.result
    return f"alert: {result.check} {result.cause or result.item}".strip()


def people_told(state: State, about: str) -> None:
    """Until it is over, nobody is told of it again."""
    for noted in of_whole_job(state):
        noted.told = noted.told or matter(noted) == about
