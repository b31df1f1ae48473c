"""The time account: every second of a job's life has exactly one owner.

core/observe.py and core/controller.py switch owners as facts come in; views and the table at the
end of a run read totals. ETTR (effective training time ratio) = training / wall-clock time,
cumulative and over a sliding hour (ByteRobust, section 8.1.3).

Facts arrive after the time they speak of ("the rank died 0.2 s ago"), so a switch may lie in the
past, but never before the segment it ends: earlier segments are settled.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.model import Seconds

WINDOW_S: Seconds = 3600.0
"""The paper's sliding window (ByteRobust, section 8.1.3)."""


class Owner(StrEnum):
    """What a second of the job's life was spent on."""

    TRAINING = "training"
    DETECTING = "detecting"
    """From the fault to the moment the controller knows of it."""
    LOCATING = "locating"
    """From there to the decision what to do."""
    RESTARTING = "restarting"
    """Stopping, starting, restoring, the first new step; also the first start of the job."""
    RECOMPUTING = "recomputing"
    """Steps done again, and the part of a step that a fault cut off."""
    CHECKPOINT_STALL = "checkpoint_stall"
    WAITING = "waiting_for_machines"
    PAUSED = "paused"


class Segment(msgspec.Struct, array_like=True):
    """From `since` to the next segment's `since`, this owner; `incident` is empty for none."""

    owner: Owner
    since: Seconds
    incident: str = ""


class TimeAccount(msgspec.Struct):
    """Segments in order of time, without gaps. Empty before the job was submitted."""

    segments: list[Segment] = []
    ended_at: Seconds | None = None

    def switch(self, owner: Owner, at: Seconds, incident: str = "") -> None:
        """From `at` on (not before the current segment began) time belongs to `owner`."""
        if self.ended_at is not None:
            return
        if not self.segments:
            self.segments.append(Segment(owner, at, incident))
            return
        last = self.segments[-1]
        if (last.owner, last.incident) == (owner, incident):
            return
        if at <= last.since:
            self.segments[-1] = Segment(owner, last.since, incident)
        else:
            self.segments.append(Segment(owner, at, incident))

    def carve(self, owner: Owner, at: Seconds, incident: str) -> None:
        """The end of the newest training segment, from `at` on, turns out to be `owner`'s.

        Used when it becomes known how much of the last step was cut off.
        """
        index = len(self.segments) - 1
        while index >= 0 and self.segments[index].owner is not Owner.TRAINING:
            index -= 1
        if index < 0 or index + 1 == len(self.segments):
            return
        if self.segments[index].since < at < self.segments[index + 1].since:
            self.segments.insert(index + 1, Segment(owner, at, incident))

    def end(self, at: Seconds) -> None:
        """The job is over: no second after this one is counted."""
        if self.ended_at is None:
            self.ended_at = max(at, self.segments[-1].since) if self.segments else at

    @property
    def current(self) -> Owner | None:
        return self.segments[-1].owner if self.segments else None


def spent(
    account: TimeAccount,
    now: Seconds,
    *,
    incident: str | None = None,
    since: Seconds | None = None,
) -> dict[Owner, Seconds]:
    """Seconds per owner up to `now`, of one incident if given, after `since` if given."""
    end = now if account.ended_at is None else min(now, account.ended_at)
    totals = dict.fromkeys(Owner, 0.0)
    ends = [*(segment.since for segment in account.segments[1:]), end]
    for segment, until in zip(account.segments, ends, strict=False):
        if incident is not None and segment.incident != incident:
            continue
        start = segment.since if since is None else max(segment.since, since)
        totals[segment.owner] += max(0.0, until - start)
    return totals


def ettr(account: TimeAccount, now: Seconds, *, window_s: Seconds | None = None) -> float | None:
    """Training time / wall-clock time, cumulative or over the last `window_s`; None before any."""
    totals = spent(account, now, since=None if window_s is None else now - window_s)
    wall = sum(totals.values())
    return totals[Owner.TRAINING] / wall if wall > 0 else None
