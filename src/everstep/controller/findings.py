"""Findings of other people's monitors: bodies of requests in, alerts of the job's machines out.

Pure: server.py gives it what came over HTTP and posts the events. Each finding is taken or refused
by itself, with one sentence: a monitor that watches a whole cluster names many machines that are
none of this job's. Nothing evicts that does not say so in so many words.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from everstep.core.alerts import RESERVED, SAME_S
from everstep.core.state import Machine, Noted, State
from everstep.diagnosis.words import Category, Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Alert, Counts, Result
from everstep.model import EverstepError, MachineId, Seconds, Value

OLDEST_S: Seconds = 600.0
"""What is older says nothing about now: a queue that is worked off late must evict nobody."""
AHEAD_S: Seconds = 30.0
"""Clocks that are kept by NTP differ by less; a time further ahead is a mistake."""
AT_MOST = 200
"""Findings taken from one request: each is one record of the journal."""
BODY_BYTES_MAX = 1 << 20
"""Of a request: 200 alerts with long annotations are a third of that."""
TEXT_CHARS = 500
MACHINE_LABELS = ("machine", "node", "instance", "host", "nodename", "kubernetes_node")
"""Labels of an alert that may name a machine, best first; names of other things are passed over."""
ITEM_LABELS = ("gpu", "device", "interface", "port", "mountpoint")
"""Labels that tell alerts of one machine with the same name apart."""
SEVERITIES = {"critical": Verdict.SUSPECT, "warning": Verdict.WARN, "info": Verdict.INFO}
"""What a severity is worth. Alerts are written for people who look, so none of them evicts."""
_VERDICTS = [verdict for verdict in Verdict if verdict is not Verdict.ERROR]

Name = Annotated[str, msgspec.Meta(max_length=200)]
Time = float | Annotated[datetime, msgspec.Meta(tz=True)]
Event = AlertRaised | AlertCleared
_Body = TypeVar("_Body")


class Finding(Value, frozen=True, kw_only=True):
    """One finding in the plain form, the body of /v1/findings has a list of them."""

    machine: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    """Its id in the job, host name or address, with or without a port."""
    item: Name = ""
    verdict: Name
    at: Time
    """Seconds since the epoch, or RFC 3339."""
    text: str
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    """Name of the monitor."""
    check: Name = ""
    """Empty: the name of the monitor."""
    resolved: bool = False
    category: Name = Category.NONE
    counts: Name = Counts.NEVER
    do: str = ""


class Findings(Value, frozen=True, kw_only=True):
    """Body of /v1/findings."""

    findings: list[msgspec.Raw]


class Notification(Value, frozen=True, kw_only=True):
    """Body that Alertmanager's webhook sends, version 4."""

    version: str
    receiver: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    alerts: list[msgspec.Raw]


class Firing(Value, frozen=True, kw_only=True):
    """One alert of Alertmanager."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str] = {}
    starts_at: Time = msgspec.field(name="startsAt")
    ends_at: Time = msgspec.field(name="endsAt", default=0.0)


class Answer(Value, frozen=True, kw_only=True):
    """What became of one finding."""

    accepted: bool
    machines: tuple[MachineId, ...] = ()
    """Of the job, that it is about."""
    why: str = ""
    """Why it was refused."""


class Answers(Value, frozen=True, kw_only=True):
    """Answer to a request, in the order of its findings."""

    accepted: int
    refused: int
    findings: list[Answer]


class NoFindings(EverstepError):
    """A body that is not what it should be as a whole."""


class Translated(NamedTuple):
    """What a body comes to."""

    answers: Answers
    events: list[Event]


class _Refused(Exception):
    """Of one finding; its text is the sentence."""


class _Said(NamedTuple):
    """A finding of either form."""

    names: Sequence[str]
    """Of its machine, best first."""
    result: Result
    source: str
    at: Seconds
    resolved: bool

    @property
    def over(self) -> bool:
        """Also a monitor that says that all is well ends what it said before."""
        return self.resolved or self.result.verdict is Verdict.INFO


def from_plain(body: bytes, state: State, now: Seconds) -> Translated:
    """The plain form. NoFindings if it is not even that."""
    return _translated(_decoded(body, Findings).findings, _plain, state, now)


def from_webhook(body: bytes, state: State, now: Seconds) -> Translated:
    """Alertmanager's form; NoFindings also for another version of it."""
    told = _decoded(body, Notification)
    if told.version != "4":
        raise NoFindings(f"this is version {told.version} of Alertmanager's form: 4 is understood")
    return _translated(told.alerts, lambda raw: _firing(raw, told.receiver), state, now)


def _translated(
    raws: Sequence[msgspec.Raw], read: Callable[[msgspec.Raw], _Said], state: State, now: Seconds
) -> Translated:
    events: list[Event] = []
    answers = []
    for raw in raws[:AT_MOST]:
        try:
            said = read(raw)
            meant = _meant(said.names, state)
            events += _events(said, meant, now)
        except _Refused as refused:
            answers.append(Answer(accepted=False, why=str(refused)))
        else:
            answers.append(Answer(accepted=True, machines=tuple(each.machine for each in meant)))
    rest = f"one request may bring {AT_MOST} findings: send the rest in others"
    answers += [Answer(accepted=False, why=rest) for _ in raws[AT_MOST:]]
    accepted = sum(answer.accepted for answer in answers)
    told = Answers(accepted=accepted, refused=len(answers) - accepted, findings=answers)
    return Translated(told, events)


def _decoded(body: bytes, of: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=of)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoFindings(f"the request's body is not what it should be: {error}") from error


def _one(raw: msgspec.Raw, of: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(raw, type=of)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Refused(f"it is not what it should be: {error}") from error


# --- the two forms -------------------------------------------------------------------------------


def _plain(raw: msgspec.Raw) -> _Said:
    given = _one(raw, Finding)
    result = Result(
        check=given.check or given.source,
        item=given.item,
        verdict=_verdict(given.verdict),
        why=_short(given.text) or given.check or given.source,
        do=_short(given.do),
        category=_category(given.category),
        counts=_counts(given.counts),
    )
    return _Said(
        names=[given.machine],
        result=result,
        source=given.source,
        at=_seconds(given.at),
        resolved=given.resolved,
    )


def _firing(raw: msgspec.Raw, receiver: str) -> _Said:
    alert = _one(raw, Firing)
    labels, notes = alert.labels, alert.annotations
    resolved = alert.status == "resolved"
    if not resolved and alert.status != "firing":
        raise _Refused(f"its status is {alert.status!r}: firing and resolved are understood")
    # One name is often used for two alerts, which are not over at the same time.
    name = "/".join(filter(None, (labels.get("alertname", receiver), labels.get("severity"))))
    texts = (notes.get(key, "") for key in ("summary", "description", "message"))
    result = Result(
        check=name[:200],
        item=_item(labels),
        verdict=_of_labels(labels),
        why=_short(next(filter(None, texts), name)),
        do=f"See {notes['runbook_url']}." if notes.get("runbook_url") else "",
        category=_category(labels.get("everstep_category", Category.NONE)),
        counts=_counts(labels.get("everstep_counts", Counts.NEVER)),
    )
    return _Said(
        names=_names(labels),
        result=result,
        source=receiver,
        at=_seconds(alert.ends_at if resolved else alert.starts_at),
        resolved=resolved,
    )


def _names(labels: Mapping[str, str]) -> list[str]:
    names = [labels[label] for label in MACHINE_LABELS if labels.get(label)]
    if not names:
        raise _Refused(f"it has none of the labels {', '.join(MACHINE_LABELS)}: no machine")
    return names


def _item(labels: Mapping[str, str]) -> str:
    said = labels.get("everstep_item")
    parts = (f"{label} {labels[label]}" for label in ITEM_LABELS if labels.get(label))
    return (said if said is not None else " ".join(parts))[:200]


def _of_labels(labels: Mapping[str, str]) -> Verdict:
    said = labels.get("everstep_verdict")
    if said is not None:
        return _verdict(said)
    severity = labels.get("severity", "warning")
    if severity not in SEVERITIES:
        raise _Refused(
            f"severity {severity!r} is none of {', '.join(SEVERITIES)}: "
            "add a label everstep_verdict to the alert's rule"
        )
    return SEVERITIES[severity]


def _verdict(text: str) -> Verdict:
    if text not in _VERDICTS:
        raise _Refused(f"verdict {text!r} is none of {', '.join(_VERDICTS)}")
    return Verdict(text)


def _category(text: str) -> Category:
    if text not in list(Category):
        raise _Refused(f"category {text!r} is none of {', '.join(Category)}")
    return Category(text)


def _counts(text: str) -> Counts:
    if text not in list(Counts):
        raise _Refused(f"counts {text!r} is none of {', '.join(Counts)}")
    return Counts(text)


def _seconds(time: Time) -> Seconds:
    return time.timestamp() if isinstance(time, datetime) else time


def _short(text: str) -> str:
    """On one line, and not longer than anybody reads."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS else line[: TEXT_CHARS - 3] + "..."


# --- to the machines of the job ------------------------------------------------------------------


def _events(said: _Said, machines: Sequence[Machine], now: Seconds) -> list[Event]:
    """What this changes, for each machine; nothing of what is known already."""
    if said.source in RESERVED:
        raise _Refused(f"source {said.source!r} is a name of everstep's own: choose another")
    age_s = now - said.at
    if age_s < -AHEAD_S:
        raise _Refused(f"its time is {-age_s:.0f} s ahead of the controller's: compare the clocks")
    if said.over:
        return [_cleared(machine, said) for machine in machines if _ends(machine, said)]
    if age_s > OLDEST_S:
        raise _Refused(
            f"it is {age_s / 60:.0f} min old: what is older than {OLDEST_S / 60:.0f} min says "
            "nothing about now"
        )
    result = said.result
    if len(machines) > 1:  # stand-ins: what is wrong with their host is one thing, not several
        result = msgspec.structs.replace(result, cause=f"host {machines[0].host}")
    alert = Alert(result=result, source=said.source, age_s=max(0.0, age_s))
    return [
        AlertRaised(machine=machine.machine, alert=alert)
        for machine in machines
        if not _known(machine, said)
    ]


def _cleared(machine: Machine, said: _Said) -> AlertCleared:
    check, item = said.result.key
    return AlertCleared(machine=machine.machine, check=check, item=item, source=said.source)


def _ends(machine: Machine, said: _Said) -> bool:
    """Whether something holds that this ends. What came late may be of an earlier time."""
    standing = _standing(machine, said)
    if standing is not None and said.at < standing.at - SAME_S:
        raise _Refused(f"it was over {standing.at - said.at:.0f} s before it was raised again")
    return standing is not None


def _known(machine: Machine, said: _Said) -> bool:
    """Whether this was said before: monitors repeat what they say for hours."""
    standing = _standing(machine, said)
    if standing is None or said.at > standing.at + SAME_S:
        return False
    before = standing.alert.result
    return (before.verdict, before.counts) == (said.result.verdict, said.result.counts)


def _standing(machine: Machine, said: _Said) -> Noted | None:
    for noted in machine.alerts:
        same = noted.alert.source == said.source and noted.alert.result.key == said.result.key
        if same and noted.cleared_at is None:
            return noted
    return None


def _meant(names: Sequence[str], state: State) -> list[Machine]:
    """The machines of the job that the first of these names means that means any."""
    present = [each for each in state.machines.values() if not (each.evicted or each.released)]
    for name in names:
        found = _called(name, present)
        if found:
            return found
    said = " or ".join(sorted(set(names)))
    known = ", ".join(each.machine for each in present[:5]) + ", ..." * (len(present) > 5)
    raise _Refused(f"{said} is no machine of this job: it has {known or 'none yet'}")


def _called(name: str, machines: Sequence[Machine]) -> list[Machine]:
    """By id; else by host name or address; else by host name without its domain."""
    by_id = [each for each in machines if each.machine == name]
    if by_id:
        return by_id
    forms = {_folded(name), _folded(_without_port(name))}
    exact = [each for each in machines if {_folded(each.host), _folded(each.address)} & forms]
    return exact or [each for each in machines if any(_same_host(f, each.host) for f in forms)]


def _without_port(name: str) -> str:
    """HOST:PORT and [ADDRESS]:PORT; an IPv6 address without brackets has no port."""
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.count(":") == 1 else name


def _folded(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower().rstrip(".")


def _same_host(name: str, host: str) -> bool:
    """Whether one of the two is the other one with its domain."""
    mine, theirs = name.partition("."), _folded(host).partition(".")
    one_is_short = bool(mine[1]) != bool(theirs[1])
    return one_is_short and mine[0] == theirs[0] and not mine[0].isdigit()
