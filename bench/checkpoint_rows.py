"""From what bench/checkpoint.py saw to its figures and its table. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from checkpoint_turns import EverstepRound, Kill, Seen, Transfers
from form import Row

PEERS = ("dcp_async", "dcp_staged", "dlrover", "lm_resiliency")
"""Those that are meant to block little; `dcp` is not."""
ALL = ("dcp", *PEERS)
TITLES = {
    "dcp": "torch DCP save",
    "dcp_async": "torch DCP async_save",
    "dcp_staged": "torch DCP async_save, background stager",
    "dlrover": "DLRover flash checkpoint, memory",
    "lm_resiliency": "lm-resiliency, with peer copy",
}
GIB = 1 << 30


class Sample(NamedTuple):
    """All rounds with one kind of step."""

    everstep: list[EverstepRound]
    rivals: list[dict[str, Seen]]

    def ours(self, figure: Callable[[Seen], float]) -> float:
        return median(figure(each.seen) for each in self.everstep)

    def theirs(self, saver: str, figure: Callable[[Seen], float]) -> float | None:
        values = [figure(each[saver]) for each in self.rivals if saver in each]
        return median(values) if values else None


class Findings:
    """What was seen so far."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        """Rivals without figures, and why."""
        self.samples: dict[str, Sample] = {}
        """By the suffix of their keys; the empty one is the main row."""
        self.transfers: list[Transfers] = []
        self.kills: list[Kill] = []
        self.dcp_load_s: list[float] = []
        self.memory: dict[str, int] = {}
        """Bytes that each way to save takes, beyond the state."""
        self.backups_failed: list[str] = []

    def add(self, suffix: str, ours: EverstepRound, theirs: dict[str, Seen]) -> None:
        sample = self.samples.setdefault(suffix, Sample([], []))
        sample.everstep.append(ours)
        sample.rivals.append(theirs)


def rows_of(findings: Findings) -> list[Row]:
    rows = []
    for suffix, sample in findings.samples.items():
        rows += _rows_of_sample(findings, suffix, sample)
        if not suffix:
            rows += [*_copies(findings, sample), *_backups(findings, sample)]
    return [*rows, Row("memory_bytes", findings.memory, note="beyond the state, 2 ranks together")]


def _rows_of_sample(findings: Findings, suffix: str, sample: Sample) -> list[Row]:
    blocked_s = sample.ours(lambda seen: seen.blocked_s)
    spread = _spread([each.seen.blocked_s for each in sample.everstep])
    rows = [
        Row(
            f"blocked_s{suffix}",
            blocked_s,
            note=f"everstep: wait before optimizer + save, {spread}",
        ),
        Row(f"slowdown_s{suffix}", sample.ours(lambda seen: seen.slowdown_s)),
        Row(f"step_time_ratio{suffix}", sample.ours(lambda seen: seen.ratio)),
        Row(
            f"step_time_ratio_with_backups{suffix}",
            median(each.ratio_with_backups for each in sample.everstep),
            note="of all steps, a backup in 3 to 6 of them",
        ),
    ]
    peers = []
    for saver in ALL:
        reason = findings.missing.get(saver, "not in this row")
        theirs_s = sample.theirs(saver, lambda seen: seen.blocked_s)
        slowdown_s = sample.theirs(saver, lambda seen: seen.slowdown_s)
        queued_s = sample.theirs(saver, lambda seen: seen.queued_s)
        waits = f"; waits {queued_s:.3f} s more for the save before" if queued_s else ""
        note = reason if theirs_s is None else TITLES[saver] + waits
        rows.append(Row(f"blocked_{saver}_s{suffix}", theirs_s, note=note))
        rows.append(Row(f"slowdown_{saver}_s{suffix}", slowdown_s))
        if theirs_s is not None and saver in PEERS:
            peers.append((theirs_s, saver))
    if peers:
        best_s, best = min(peers)
        aim = None if suffix else 0.05
        rows.append(
            Row(
                f"blocked_ratio_to_best_peer{suffix}",
                blocked_s / best_s,
                at_most=aim,
                note=TITLES[best],
            )
        )
    return rows


def _copies(findings: Findings, sample: Sample) -> list[Row]:
    """Restores and plain copies, and what a save costs beside one."""
    kills = findings.kills
    memcpy_s = median(kill.memcpy_s for kill in kills)
    restores = [kill.restore_s for kill in kills]
    over = [kill.restore_s / kill.memcpy_s for kill in kills]
    load_s = median(findings.dcp_load_s) if findings.dcp_load_s else None
    slowdown_s = sample.ours(lambda seen: seen.slowdown_s)
    return [
        Row("memcpy_s", memcpy_s, note="512 MiB by one thread, both ranks at once"),
        Row("memcpy_fresh_s", median(k.memcpy_fresh_s for k in kills), note="into new memory"),
        Row("slowdown_over_memcpy", slowdown_s / memcpy_s),
        Row("restore_s", median(restores), note=f"after kill -9, from memory, {_spread(restores)}"),
        Row("restore_over_memcpy", median(over), at_most=2, note=_spread(over)),
        Row("restore_dcp_s", load_s, note="dcp.load from files in memory"),
        Row("steps_lost_after_kill", max(kill.steps_lost for kill in kills), at_most=1),
    ]


def _backups(findings: Findings, sample: Sample) -> list[Row]:
    adds = [each.backup_adds_s for each in sample.everstep if each.backup_adds_s is not None]
    backups = [moved.backups for moved in findings.transfers]
    sockets = [moved.sockets for moved in findings.transfers]
    over = [moved.backups / moved.sockets for moved in findings.transfers]
    under = "both directions, while the ranks train"
    return [
        Row("backup_bytes_per_s", median(backups), note=f"{under}, {_spread(backups)}"),
        Row("tcp_bytes_per_s", median(sockets), note=f"plain sockets, {under}, {_spread(sockets)}"),
        Row("backup_over_tcp", median(over), at_least=0.5, note=_spread(over)),
        Row(
            "backup_adds_s",
            median(adds) if adds else None,
            note="to all the steps that one backup overlaps, together",
        ),
        Row(
            "backups_failed",
            len(findings.backups_failed),
            at_most=0,
            note="; ".join(sorted(set(findings.backups_failed))),
        ),
    ]


def summary_of(findings: Findings) -> list[Sequence[str]]:
    """The table for people, its head first: the main row."""
    sample = findings.samples[""]
    kills = findings.kills
    restore = f"{median(kill.restore_s for kill in kills):.3f}"
    lost = f"{max(kill.steps_lost for kill in kills)} lost"
    backed = [each.ratio_with_backups for each in sample.everstep]
    memory = {name: f"{size / GIB:.1f} GiB" for name, size in findings.memory.items()}
    lines: list[Sequence[str]] = [
        (
            "1 GiB on 2 ranks",
            "blocked s",
            "slower s",
            "step ratio",
            "restore s",
            "kill -9",
            "memory",
        ),
        ("no checkpoint", "0", "0", "1", "-", "all lost", "0"),
        (
            "everstep, every step",
            f"{sample.ours(lambda seen: seen.blocked_s):.4f}",
            f"{sample.ours(lambda seen: seen.slowdown_s):.3f}",
            f"{sample.ours(lambda seen: seen.ratio):.3f}",
            *(restore, lost, memory["everstep"]),
        ),
        (
            "everstep, with peer backups",
            *("the same", "-", f"{median(backed):.3f}", restore, lost),
            memory["everstep_kept_for_peers"] + " more",
        ),
    ]
    for saver in ALL:
        blocked_s = sample.theirs(saver, lambda seen: seen.blocked_s)
        if blocked_s is None:
            lines.append((TITLES[saver], findings.missing[saver], *("",) * 5))
            continue
        load = f"{median(findings.dcp_load_s):.3f}" if findings.dcp_load_s else "-"
        lines.append(
            (
                TITLES[saver],
                f"{blocked_s:.4f}",
                f"{sample.theirs(saver, lambda seen: seen.slowdown_s):.3f}",
                f"{sample.theirs(saver, lambda seen: seen.ratio):.3f}",
                load if saver.startswith("dcp") else "-",
                "not tried",
                memory[saver],
            )
        )
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g} in {len(values)}"
