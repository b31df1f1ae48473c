"""What people read: sentences and rich tables made from the views of controller/views.py.

Pure: views in, text or tables out. The same for a live controller and for a replayed journal.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from everstep.controller.views import (
    EvictionsView,
    EvictionView,
    IncidentsView,
    IncidentView,
    StatusView,
)
from everstep.core.ettr import Owner
from everstep.core.state import Phase
from everstep.diagnosis.words import Verdict
from everstep.model import Seconds

IN_TABLE = (
    (Owner.DETECTING, "detecting"),
    (Owner.LOCATING, "locating"),
    (Owner.WAITING, "waiting"),
    (Owner.RESTARTING, "restarting"),
    (Owner.RECOMPUTING, "recomputing"),
)
"""Columns of the table of incidents, in the order in which an incident spends them."""

ALERTS_SHOWN = 20
"""Rows: more of them say no more, and a thousand machines may share one cause."""


def progress(status: StatusView) -> str:
    """One line: where the job is."""
    parts = [_where(status)]
    if status.step_s is not None and status.phase is Phase.RUNNING:
        parts.append(f"{seconds(status.step_s)} per step")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    parts.append(_machines(status))
    if status.ettr is not None:
        parts.append(f"ETTR {status.ettr:.3f}")
    if status.looking:
        parts.append(status.looking.partition(":")[0])
    if status.incident is not None:
        parts.append(f"incident {status.incident} is open")
    return " | ".join(parts)


def looking(status: StatusView) -> list[str]:
    """A stall or slow training that is looked into, and who is slow: one line each."""
    slow = [f"straggler: {status.straggler}"] if status.straggler else []
    return [f"looked into: {status.looking}", *slow] if status.looking else slow


def layout(status: StatusView) -> list[str]:
    """What is known of parallel groups, and what needs them: one line each."""
    known = status.layout
    where = f"{known.text} (the fastest dimension first), from {known.source}"
    lines = [f"layout: {where if known.text else 'unknown'}"]
    lines += [f"  {remark}" for remark in known.remarks]
    lines += [f"  warning: {known.disagreement}"] if known.disagreement else []
    return lines + [f"{m.name} is {'on' if m.on else 'off'}: {m.why}" for m in status.mechanisms]


def code(status: StatusView) -> list[str]:
    """Which code runs, and which waits: one line each."""
    known = status.code
    if not known.running:
        return [f"code: not versioned: {known.text}"] if known.text else []
    waiting = [f"  waiting: {each}" for each in known.waiting]
    return [f"code: {known.running} ({known.text})", *waiting]


def copies(status: StatusView) -> str:
    """The newest steps that outlive a machine, and all of them."""
    safe = "none" if status.machine_safe is None else f"step {status.machine_safe}"
    disk = f"step {max(status.published)}" if status.published else "none"
    return f"newest step in the memory of two machines: {safe}; on disk: {disk}"


def evictions(view: EvictionsView) -> list[str]:
    """How often an eviction was wrong, as far as it is known."""
    if not view.count:
        return []
    line = f"evictions: {view.count}, {view.guilty} guilty, {view.innocent} innocent"
    if view.false_share is not None:
        line += f": {view.false_share:.0%} of those with a verdict were false"
    return [line]


def evicted(view: IncidentsView) -> Table:
    """Each eviction, and what became known of the machine since."""
    table = _table("evicted", "host", "verdict", "why it was evicted, and what is known since")
    for each in view.evictions:
        verdict = {None: "not known", True: "guilty", False: "innocent"}[each.guilty]
        if each.returned:
            verdict += ", returned"
        told = f"{each.why}; {each.verdict or _tests(each)}"
        table.add_row(*map(Text, (each.machine, each.host, verdict, told)))
    return table


def _tests(eviction: EvictionView) -> str:
    if not eviction.tests:
        return "not tested yet"
    return f"passed {eviction.passed} of {eviction.tests} tests"


def standbys(status: StatusView) -> list[str]:
    """How many there are of those that there should be; no line if there should be none."""
    spare = _spare(status)
    if not spare and not status.standbys_wanted:
        return []
    why = f" ({status.standbys_why})" if status.standbys_why else ""
    return [f"standbys: {spare} of {status.standbys_wanted} wanted{why}"]


def _spare(status: StatusView) -> int:
    return sum(1 for machine in status.machines if machine.condition == "standby")


def machines(status: StatusView) -> Table:
    table = _table("machine", "host", "address", "position", "ranks", "condition")
    for machine in status.machines:
        position = "" if machine.node_rank is None else str(machine.node_rank)
        table.add_row(
            machine.machine,
            machine.host,
            machine.address,
            position,
            span(machine.ranks),
            machine.condition + (f": {machine.why}" if machine.why else ""),
        )
    return table


def alerts(status: StatusView) -> Table:
    """What checks and monitors say, as far as it fits on a screen."""
    table = _table("machine", "check", "item", "verdict", "for", "why", "said by")
    for alert in status.alerts[:ALERTS_SHOWN]:
        verdict = "could not run" if alert.verdict is Verdict.ERROR else str(alert.verdict)
        texts = (alert.check, alert.item, verdict, age(alert.age_s), alert.why, alert.source)
        table.add_row(alert.machine, *map(Text, texts))
    if len(status.alerts) > ALERTS_SHOWN:
        table.add_row(f"and {len(status.alerts) - ALERTS_SHOWN} more: see --json")
    return table


def incidents(view: IncidentsView) -> Table:
    """Per incident the seconds it cost, by what they were spent on; the sums below."""
    columns = [
        (owner, title)
        for owner, title in IN_TABLE
        if owner is not Owner.WAITING or _sum(view, owner) > 0
    ]
    table = _table("incident", "what happened, and how it ended")
    for _, title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("total s", justify="right", no_wrap=True)
    for incident in view.incidents:
        cost = [incident.seconds.get(owner, 0.0) for owner, _ in columns]
        story = Text(f"{incident.symptom}: {outcome(incident)}")
        told = (incident.cause, "" if incident.verdict in incident.cause else incident.verdict)
        for sentence in filter(None, told):
            story.append(f"; {sentence}")
        if incident.rungs:
            story.append(f" [{rungs(incident)}]")
        table.add_row(incident.incident, story, *map(number, cost), number(sum(cost)))
    if len(view.incidents) > 1:
        sums = [_sum(view, owner) for owner, _ in columns]
        table.add_section()
        table.add_row("all", "", *map(number, sums), number(sum(sums)))
    return table


def outcome(incident: IncidentView) -> str:
    """How an incident ended, or that it has not."""
    if incident.closed_at is None:
        return "open"
    parts = [incident.outcome] if incident.outcome else ["closed"]
    if incident.restored is not None:
        restored = f"restored step {incident.restored}"
        parts.append(restored if incident.restored >= 0 else "began anew")
    if incident.evicted:
        group = f" (group {incident.group})" if incident.group else ""
        parts.append(f"evicted {', '.join(incident.evicted)}{group}")
    return "; ".join(parts)


def rungs(incident: IncidentView) -> str:
    """What was tried, in order: "reattempt, rollback"."""
    return ", ".join(str(taken.rung) for taken in incident.rungs)


def account(spent: Mapping[Owner, Seconds], ettr: float | None) -> str:
    """One sentence: who owned the seconds of the job's life, and the ETTR."""
    wall = sum(spent.values())
    parts = [
        f"{str(owner).replace('_', ' ')} {number(amount)}"
        for owner, amount in spent.items()
        if amount >= 0.005
    ]
    ratio = "" if ettr is None else f" ETTR {ettr:.4f} ({ettr:.1%} of the time trained)."
    return f"Of {number(wall)} s: {', '.join(parts) or 'nothing'}.{ratio}"


def opened(incident: IncidentView) -> str:
    return f"incident {incident.incident} opened: {incident.symptom}"


def closed(incident: IncidentView) -> str:
    cost = ", ".join(
        f"{title} {number(incident.seconds.get(owner, 0.0))} s"
        for owner, title in IN_TABLE
        if incident.seconds.get(owner, 0.0) >= 0.005
    )
    return f"incident {incident.incident} closed: {outcome(incident)} ({cost or 'no time lost'})"


def news(before: StatusView | None, after: StatusView) -> list[str]:
    """What a viewer should be told besides incidents, one sentence each, oldest first."""
    lines = []
    if before is not None and after.term > before.term:
        lines.append(f"the controller is back, term {after.term}; training went on meanwhile")
    known = before.notes if before is not None else ()
    lines += [note for note in after.notes if note not in known]
    conditions = {m.machine: m.condition for m in before.machines} if before is not None else {}
    for machine in after.machines:
        told = conditions.get(machine.machine) == machine.condition
        if machine.condition in ("lost", "evicted") and not told:
            lines.append(f"machine {machine.machine} is {machine.condition}: {machine.why}")
        elif machine.condition == "standby" and conditions.get(machine.machine) == "evicted":
            lines.append(f"machine {machine.machine} passed its tests and is a standby again")
    if before is not None and before.code.running != after.code.running and before.code.running:
        lines.append(f"code {after.code.running} takes the place of {before.code.running}")
    over = after.outcome is not None  # the last generation only fences off the others
    if before is not None and after.generation > before.generation > 0 and not over:
        lines.append(f"generation {after.generation} begins, {_from(after)}")
    return lines


def seconds(amount: Seconds) -> str:
    """A duration with its unit, three digits: 120 ms, 1.25 s."""
    return f"{amount * 1000:.0f} ms" if amount < 1 else f"{amount:.2f} s"


def age(amount: Seconds) -> str:
    """A duration in one unit: 42 s, 7 min, 5 h, 3 d."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if amount < most:
            return f"{amount / size:.0f} {unit}"
    return f"{amount / 86400:.0f} d"


def number(amount: Seconds) -> str:
    """A number of seconds for a column."""
    return f"{amount:.2f}"


def span(ranks: tuple[int, ...]) -> str:
    """Ranks of one machine, which are always consecutive: "4-7"."""
    if not ranks:
        return ""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _where(status: StatusView) -> str:
    if status.phase is Phase.RUNNING:
        if status.finished_by_all < 0:
            return f"generation {status.generation}: before its first step"
        return f"step {status.finished_by_all}"
    if status.phase is Phase.GATHERING:
        return "gathering machines"
    if status.phase in (Phase.STOPPING, Phase.STARTING):
        return f"generation {status.generation}: {status.phase}"
    return str(status.phase)


def _machines(status: StatusView) -> str:
    members = sum(1 for machine in status.machines if machine.condition == "member")
    spare = _spare(status)
    text = f"{members} of {status.nnodes} machines"
    return f"{text} + {spare} standby" if spare or status.standbys_wanted else text


def _from(status: StatusView) -> str:
    return "from the start" if status.restored < 0 else f"from step {status.restored}"


def _sum(view: IncidentsView, owner: Owner) -> Seconds:
    return sum(incident.seconds.get(owner, 0.0) for incident in view.incidents)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
