"""What XIDs mean for a running job: NVIDIA's classes, echoes, repeats. Pure.

An XID is the number with which NVIDIA's driver reports an error of a GPU. They come as NVML events
(gpu/xid.py) and as lines of the kernel log (kernel/); both checks judge them here, by the table
that diagnosis uses as well. The order of deciding: what the driver itself recommends (XID 154 or
NVML's field 230), the site's own settings, the table, how often it happened; a code that nobody
knows makes a suspect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from everstep.agent.checks.check import Check, Limits
from everstep.diagnosis.rules import Rules, Xid, XidClass, parse
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds, Value

RESET = "Reset the GPU, then test the machine."
REBOOT = "Reboot the machine, then test it."
SUPPORT = "Test the machine, then open a ticket with the vendor."
RESTART = "Restart the job; nothing has to be done about the machine yet."
TEST = "Test the machine at the next stop."
PROGRAM = "Look into the program: it did the same on several GPUs at once."
ACTIONS = {
    1: ("GPU reset", Verdict.EVICT, RESET),
    2: ("node reboot", Verdict.EVICT, REBOOT),
    3: ("drain P2P", Verdict.SUSPECT, TEST),
    4: ("drain and reset", Verdict.EVICT, RESET),
    5: ("recovery of the IMEX domain", Verdict.SUSPECT, TEST),
    6: ("bus reset", Verdict.EVICT, REBOOT),
    7: ("system reboot", Verdict.EVICT, REBOOT),
}
"""NVML's field 230 (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION): what the driver says must be done."""

_NAMED_ACTIONS = (
    (re.compile(r"drain and reset", re.IGNORECASE), 4),
    (re.compile(r"\bimex\b", re.IGNORECASE), 5),
    (re.compile(r"bus reset", re.IGNORECASE), 6),
    (re.compile(r"system reboot", re.IGNORECASE), 7),
    (re.compile(r"drain p2p", re.IGNORECASE), 3),
    (re.compile(r"node reboot", re.IGNORECASE), 2),
    (re.compile(r"gpu reset", re.IGNORECASE), 1),
)
_TO_NONE = re.compile(r" to (?:0x0 )?\(?none\b", re.IGNORECASE)
_CAUSED_BY = re.compile(r"caused by previous Xid (\d+)")
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?$", re.IGNORECASE)

LOST, RPC_TIMEOUT, RECOVERY = 79, 119, 154
ALWAYS_ECHOES = frozenset({43, 45, RECOVERY})
"""Next to an error they tell of its consequences."""
STORM_S: Seconds = 1.0
MOST_EVENTS = 64
"""Of one kind from one GPU that are looked at, one a second: a broken GPU writes thousands."""
SYMPATHETIC = frozenset({94, 95})
"""Also reported for what another error did to the memory's users."""
MEMORY = frozenset({48, 63, 64, 92, 94, 95, 140, 171, 172, 175})
ORDER = (
    Verdict.INFO,
    Verdict.ERROR,
    Verdict.JOB,
    Verdict.USER,
    Verdict.WARN,
    Verdict.SUSPECT,
    Verdict.EVICT,
)
"""The weakest first."""


class XidEvent(Value, frozen=True, kw_only=True):
    """One XID, as the driver told of it."""

    at: Seconds
    """CLOCK_BOOTTIME, as the times of samples."""
    pci: str
    """Of the GPU, as `pci_address` writes it; empty if unknown."""
    code: int
    text: str = ""
    """The rest of the kernel's line; NVML gives none."""
    action: int | None = None
    """NVML's field 230, read right after; None: unknown."""


class XidLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of checks that judge XIDs."""

    fresh_s: Seconds = 60.0
    """Seconds. An XID older than this is history: it counts as a repeat, but says nothing about the
    GPU as it is now. Old lines that keep a repaired machine away are the commonest complaint about
    checks that read logs (Azure/azurehpc-health-checks, PR 648)."""
    echo_within_s: Seconds = 5.0
    """Seconds before and after an error in which 43, 45, 94, 95, 119 and 154 are its echoes."""
    one_program_within_s: Seconds = 1.0
    """Seconds in which the same program error on several GPUs is one mistake of the program."""
    one_program_gpus: int = 2
    """GPUs that are several. NVIDIA's flow for XID 13 and 31: different GPUs, so the program."""
    repeat_within_s: Seconds = 86_400.0
    """Seconds in which errors of one GPU are counted together: NVSentinel's window."""
    burst_s: Seconds = 180.0
    """Seconds in which errors of one GPU count once: as in NVSentinel."""
    suspect_at: int = 2
    """Times that an application must be restarted for the same GPU before it is suspect."""
    evict_at: int = 3
    """Times before the machine goes; program errors (13, 31) stay suspect."""
    verdicts: dict[str, Verdict] = {}
    """XID -> verdict of the site. Fleets differ about 32, 38, 44, 60, 63, 68, 69, 92, 94, 109..."""


class XidFinding(Value, frozen=True, kw_only=True):
    """What the recent XIDs of one GPU mean."""

    pci: str
    """Empty: several GPUs, or an unknown one."""
    code: int
    at: Seconds
    verdict: Verdict
    category: Category
    why: str
    do: str = ""
    cause: str = ""

    @property
    def item(self) -> str:
        return gpu_item(self.pci) if self.pci else ""

    def result(self, check: Check[Any, Any]) -> Result:
        """As a result of that check."""
        if self.verdict is Verdict.INFO:
            return check.passed(self.why, item=self.item, xid=self.code)
        return check.found(
            self.verdict,
            self.category,
            self.why,
            self.do,
            item=self.item,
            cause=self.cause,
            values={"xid": float(self.code)},
        )


def pci_address(text: str) -> str:
    """A GPU's address in one form, "0000:3b:00.0"; empty if it is none.

    NVML writes 00000000:3B:00.0, the kernel's lines 0000:3b:00 with or without the function.
    """
    found = _PCI.search(text.strip())
    if found is None:
        return ""
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}".lower()


def gpu_item(pci: str) -> str:
    """The name of a GPU in results."""
    return f"GPU {pci}"


def judge_xids(
    events: Sequence[XidEvent], now: Seconds, limits: XidLimits, driver: str = ""
) -> list[XidFinding]:
    """The gravest finding of each GPU that had an XID within `fresh_s`, ordered by address.

    `events` may reach back as far as they are known. `driver` is its version: what a driver did,
    machines with the same one may have in common.
    """
    roots = _roots(_told_apart(events, now - limits.repeat_within_s), limits)
    shared = _of_one_program(roots, limits)
    found: dict[str, XidFinding] = {}
    for root in roots:
        if root.event.at < now - limits.fresh_s:
            continue
        group = shared.get(root.event)
        finding = _judge(root, roots, shared, limits, driver) if group is None else _program(group)
        worst = found.get(finding.pci)
        if worst is None or ORDER.index(finding.verdict) > ORDER.index(worst.verdict):
            found[finding.pci] = finding
    return [found[pci] for pci in sorted(found)]


def _told_apart(events: Sequence[XidEvent], since: Seconds) -> list[XidEvent]:
    """Oldest first, without what a storm repeats: it says no more, and hides nothing this way."""
    kept: dict[tuple[str, int, str], list[XidEvent]] = {}
    for event in sorted(map(_as_named, events), key=lambda event: event.at):
        text = event.text if event.code == RECOVERY else ""
        same = kept.setdefault((event.pci, event.code, text), [])
        if event.at >= since and (not same or event.at - same[-1].at >= STORM_S):
            same.append(event)
    return sorted(
        (event for same in kept.values() for event in same[-MOST_EVENTS:]),
        key=lambda event: event.at,
    )


@cache
def table() -> Rules:
    """Versioned: `table().version` is the state of NVIDIA's catalogue."""
    file = resources.files("everstep.diagnosis.tables").joinpath("xids.toml")
    return parse(file.read_text("utf-8"), "xids.toml")


@cache
def entries() -> Mapping[int, Xid]:
    """The table by code."""
    return {code: entry for entry in table().xid for code in entry.codes}


# --- echoes --------------------------------------------------------------------------------------


class _Root(Value, frozen=True, kw_only=True):
    """An XID that is no echo, with those that are its echoes."""

    event: XidEvent
    echoes: tuple[XidEvent, ...] = ()

    @property
    def action(self) -> int:
        """What the driver recommends, told with it or by its echoes; 0: nothing, or unknown."""
        every = (self.event, *self.echoes)
        told = [event.action or _action_in(event) for event in every]
        return max(told, key=_gravity)


def _action_in(event: XidEvent) -> int:
    """The action that an XID 154 names: "... changed from 0x0 (None) to 0x1 (GPU Reset ...)"."""
    if event.code != RECOVERY:
        return 0
    named = event.text.rpartition(" to ")[2]
    return next((action for pattern, action in _NAMED_ACTIONS if pattern.search(named)), 0)


def _gravity(action: int) -> int:
    return ORDER.index(ACTIONS[action][1]) if action in ACTIONS else 0


def _roots(events: Sequence[XidEvent], limits: XidLimits) -> list[_Root]:
    """Errors with their echoes, oldest first. An echo without an error stands for itself."""
    root_of = {at: _root_of(at, events, limits) for at in range(len(events))}
    return [
        _Root(
            event=event,
            echoes=tuple(events[echo] for echo, root in root_of.items() if root == at),
        )
        for at, event in enumerate(events)
        if root_of[at] is None
    ]


def _as_named(event: XidEvent) -> XidEvent:
    """A line that says which XID caused it speaks of that one."""
    caused = _CAUSED_BY.search(event.text)
    if caused is None or int(caused[1]) == event.code:
        return event
    return XidEvent(at=event.at, pci=event.pci, code=int(caused[1]), action=event.action)


def _root_of(at: int, events: Sequence[XidEvent], limits: XidLimits) -> int | None:
    """Position of the first error near this event that it echoes."""
    event = events[at]
    for other, root in enumerate(events):
        near = abs(root.at - event.at) <= limits.echo_within_s and root.pci == event.pci
        if other != at and near and _echoes(event.code, root.code):
            return other
    return None


def _echoes(code: int, root: int) -> bool:
    if root in ALWAYS_ECHOES or not _is_error(root):
        return False
    if code == RPC_TIMEOUT:
        return root == LOST
    return code in ALWAYS_ECHOES or (code in SYMPATHETIC and root not in SYMPATHETIC)


def _is_error(code: int) -> bool:
    entry = entries().get(code)
    return entry is None or entry.class_ is not XidClass.IGNORE


# --- one program, or one GPU ---------------------------------------------------------------------


def _of_one_program(
    roots: Sequence[_Root], limits: XidLimits
) -> dict[XidEvent, tuple[XidEvent, ...]]:
    """Program errors that came on several GPUs at once -> all that belong together."""
    groups: list[list[XidEvent]] = []
    for root in roots:
        entry = entries().get(root.event.code)
        if entry is None or entry.class_ is not XidClass.USER_CODE:
            continue
        if groups and root.event.at - groups[-1][0].at <= limits.one_program_within_s:
            groups[-1].append(root.event)
        else:
            groups.append([root.event])
    return {
        event: tuple(group)
        for group in groups
        if len({event.pci for event in group}) >= limits.one_program_gpus
        for event in group
    }


def _program(group: Sequence[XidEvent]) -> XidFinding:
    gpus = len({event.pci for event in group})
    return XidFinding(
        pci="",
        code=group[0].code,
        at=group[0].at,
        verdict=Verdict.USER,
        category=Category.CUDA_ERROR,
        why=f"{_meaning(group[0].code)}, on {gpus} GPUs at once",
        do=PROGRAM,
    )


def _times(
    root: _Root,
    roots: Sequence[_Root],
    shared: Mapping[XidEvent, tuple[XidEvent, ...]],
    limits: XidLimits,
) -> int:
    """How often this GPU had an error that ends an application, this one included."""
    times, last = 0, float("-inf")
    for other in roots:
        event = other.event
        entry = entries().get(event.code)
        counts = entry is not None and entry.class_ in {XidClass.RESTART_APP, XidClass.USER_CODE}
        same = event.pci == root.event.pci and event not in shared and event.at <= root.event.at
        if counts and same and event.at - last > limits.burst_s:
            times += 1
            last = event.at
    return times


# --- judging -------------------------------------------------------------------------------------


def _judge(
    root: _Root,
    roots: Sequence[_Root],
    shared: Mapping[XidEvent, tuple[XidEvent, ...]],
    limits: XidLimits,
    driver: str,
) -> XidFinding:
    code = root.event.code
    entry = entries().get(code)
    times = _times(root, roots, shared, limits)
    verdict, do, note = _decide(root, times, limits)
    lies_in_driver = entry is not None and entry.suspicion == "driver"
    echoes = ", ".join(str(event.code) for event in root.echoes)
    why = _meaning(code) + (f", echoed by XID {echoes}" if echoes else "") + note
    return XidFinding(
        pci=root.event.pci,
        code=code,
        at=root.event.at,
        verdict=verdict,
        category=_category(code, verdict),
        why=why,
        do=do,
        cause=f"driver {driver}" if driver and lies_in_driver else "",
    )


def _decide(root: _Root, times: int, limits: XidLimits) -> tuple[Verdict, str, str]:
    """Verdict, what to do, and what to add to the reason."""
    code = root.event.code
    if root.action in ACTIONS:
        name, verdict, do = ACTIONS[root.action]
        return verdict, do, f"; the driver asks for: {name}"
    if str(code) in limits.verdicts:
        return limits.verdicts[str(code)], TEST, "; as this site has set it"
    entry = entries().get(code)
    if entry is None:
        return Verdict.SUSPECT, SUPPORT, ""
    return _by_class(entry, code, root, times, limits)


def _by_class(
    entry: Xid, code: int, root: _Root, times: int, limits: XidLimits
) -> tuple[Verdict, str, str]:
    match entry.class_:
        case XidClass.RESET_GPU | XidClass.EVICT_MACHINE:
            do = RESET if entry.class_ is XidClass.RESET_GPU else REBOOT
            sure = entry.suspicion != "ambiguous"
            return (Verdict.EVICT, do, "") if sure else (Verdict.SUSPECT, TEST, "")
        case XidClass.CONTACT_SUPPORT:
            return Verdict.SUSPECT, SUPPORT, ""
        case XidClass.PER_TEXT:
            told_none = root.event.action == 0 or _TO_NONE.search(root.event.text) is not None
            return (Verdict.INFO, "", "") if told_none else (Verdict.SUSPECT, TEST, "")
        case XidClass.IGNORE:
            return Verdict.INFO, "", ""
        case _:
            return _by_times(entry, code, times, limits)


def _by_times(entry: Xid, code: int, times: int, limits: XidLimits) -> tuple[Verdict, str, str]:
    note = f", {times} times in {limits.repeat_within_s / 3600:g} h" if times > 1 else ""
    if times >= limits.evict_at and entry.class_ is XidClass.RESTART_APP:
        return Verdict.EVICT, SUPPORT, note
    if times >= limits.suspect_at or code in MEMORY:
        return Verdict.SUSPECT, TEST, note
    return Verdict.WARN, RESTART, note


def _category(code: int, verdict: Verdict) -> Category:
    if code in MEMORY:
        return Category.GPU_MEMORY_ERROR
    return Category.GPU_UNAVAILABLE if verdict is Verdict.EVICT else Category.CUDA_ERROR


def _meaning(code: int) -> str:
    entry = entries().get(code)
    if entry is None:
        return f"XID {code}, which the table of {table().version} does not know"
    return f"XID {code}: {entry.meaning}"
