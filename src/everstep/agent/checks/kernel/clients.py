"""Clients of network file systems, as the kernel sees them: Lustre's health, FUSE's requests.

Files of /sys alone: a path on storage that hangs is never touched here (host/ does that, in a
child).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits, Source
from everstep.agent.checks.kernel.ours import fuse_connections
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Value

LUSTRE = "/sys/fs/lustre/health_check"
FUSE = "/sys/fs/fuse/connections"


class Clients(Value, frozen=True, kw_only=True):
    """One look."""

    lustre: str = ""
    """What Lustre says of itself; empty: there is none."""
    waiting: dict[str, int] = {}
    """Mount point of a FUSE file system that the job uses -> requests that have no answer yet."""
    unseen: tuple[str, ...] = ()
    """Mount points whose requests only root may see."""


class ClientsSource(Source[Clients]):
    """Lustre and FUSE."""

    name = "storage_clients"
    kind = Clients
    every_s = 10.0

    def absent(self, here: Here) -> str:
        if here.path(LUSTRE).exists() or fuse_connections(here):
            return ""
        return "the job uses neither Lustre nor FUSE here"

    def sample(self, here: Here) -> Clients:
        lustre = here.path(LUSTRE)
        waiting, unseen = {}, []
        for point, number in fuse_connections(here).items():
            try:
                waiting[point] = int(here.path(f"{FUSE}/{number}/waiting").read_text())
            except OSError:
                unseen.append(point)
        said = lustre.read_text().strip() if lustre.exists() else ""
        return Clients(lustre=said, waiting=waiting, unseen=tuple(unseen))


class LustreCheck(Check[Clients, Limits]):
    """Whether Lustre says that it is well."""

    name = "storage.lustre"
    source = "storage_clients"
    about = f"Lustre's own health: {LUSTRE}"

    def judge(self, here: Here, history: History[Clients]) -> Iterable[Result]:
        del here
        said = history.now.sample.lustre
        if not said:
            return []
        if said == "healthy":
            return [self.passed("healthy")]
        return [
            self.found(
                Verdict.SUSPECT,
                Category.FILESYSTEM_MOUNT,
                f"Lustre says that it is {said[:80]!r}",
                "Look at the server; if other machines are well, at this machine's network.",
                cause="lustre",
            )
        ]


class FuseLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of storage.fuse."""

    rounds: int = 3
    """Samples in a row in which more requests wait than before: gpud's rule for its warning."""
    least: int = 4
    """Requests that wait, before that counts: our choice, a busy client has a few at any time."""


class FuseCheck(Check[Clients, FuseLimits]):
    """Whether the process behind a FUSE file system answers the kernel."""

    name = "storage.fuse"
    source = "storage_clients"
    about = f"FUSE file systems whose process does not answer: {FUSE}/N/waiting"
    limits_type = FuseLimits
    keep = 8

    def judge(self, here: Here, history: History[Clients]) -> Iterable[Result]:
        del here
        now = history.now.sample
        for point in now.unseen:
            do = "Run the check as root, or as the user who mounted it."
            yield self.could_not_run("only root may see its requests", point, do)
        samples = [each.sample for each in (*history.past, history.now)]
        for point, waiting in sorted(now.waiting.items()):
            seen = [sample.waiting.get(point, 0) for sample in samples][-self.limits.rounds - 1 :]
            grows = all(before < after for before, after in itertools.pairwise(seen))
            if len(seen) <= self.limits.rounds or not grows or waiting < self.limits.least:
                yield self.passed(f"{waiting} requests wait", point, waiting=waiting)
                continue
            yield self.found(
                Verdict.WARN,  # as a busy one may by chance; one that hangs is host.storage's
                Category.FILESYSTEM_MOUNT,
                f"requests that wait grew {self.limits.rounds} times in a row, to {waiting}",
                "Look at the process that serves the mount, and at the storage behind it.",
                item=point,
                cause=f"mount {point}",
                values={"waiting": float(waiting)},
            )
