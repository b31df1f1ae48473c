"""Code versions of a simulated job: what is wrong with each, and the one who sends them.

The controller's host has every version (controller/server.py would refuse others), machines have
what they fetched. A version is a number here: its flaws are those of what it was made from, and
its own, unless it mends them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from everstep.core.history import Condition
from everstep.core.state import State
from everstep.diagnosis.findings import Finding, Site, Speaker
from everstep.diagnosis.logs import LogReader, Patterns, People
from everstep.diagnosis.scanner import Attentive
from everstep.diagnosis.silence import Ledger
from everstep.diagnosis.tables import own_rules
from everstep.diagnosis.who import Who
from everstep.events import UpdateRequested
from everstep.model import (
    NO_VERSION,
    CodeVersion,
    ExitStatus,
    Generation,
    RankError,
    Seconds,
    VersionId,
)

WITHIN_MAX_S: Seconds = 60.0
"""Longest window of a lazy update: within one run."""
OVERLAP_MAX = 3
WAITING = (Condition.PENDING, Condition.READY)
KNOWS = 0.8
"""Share of updates that were made with the one in them that was sent a moment before."""


class Flaw(StrEnum):
    """What is wrong with a version."""

    NO_IMPORT = "does not import"
    RAISES = "raises at its first step"
    CRASHES = "crashes now and then"
    NAN = "computes nan"
    STRAYS = "skips a collective on some ranks"


NOT_FOUND = RankError(
    kind="ModuleNotFoundError",
    message="No module named 'fused'",
    traceback="Traceback: ModuleNotFoundError: No module named 'fused'",
)
WRONG_CALL = RankError(
    kind="TypeError",
    message="forward() got an unexpected keyword argument 'scale'",
    traceback="Traceback: TypeError: forward() got an unexpected keyword argument 'scale'",
)
CRASH = ExitStatus(signal=11)


class Version(NamedTuple):
    """One that was made."""

    code: CodeVersion
    flaws: tuple[Flaw, ...]


class Codes:
    """All versions of one run."""

    def __init__(self, first: VersionId, seed: int) -> None:
        self._rng = Random(f"code of {seed}")  # noqa: S311 -- a printed seed
        self._made: dict[VersionId, Version] = {}
        self._sent: list[VersionId] = []
        """What the core had not heard of when somebody looked last."""
        if first != NO_VERSION:
            self._made[first] = Version(CodeVersion(version=first, source="where it began"), ())

    def flaws(self, version: VersionId) -> tuple[Flaw, ...]:
        """What is wrong with it; nothing with code that is no version."""
        made = self._made.get(version)
        return () if made is None else made.flaws

    def make(
        self, base: VersionId, includes: tuple[VersionId, ...], own: Flaw | None, *, mends: bool
    ) -> CodeVersion:
        """A change of `base` and of what is pending."""
        version = VersionId(f"{self._rng.getrandbits(256):064x}")
        code = CodeVersion(version=version, source="/code", base=base, includes=includes)
        former = [] if mends else [flaw for v in (base, *includes) for flaw in self.flaws(v)]
        flaws = tuple(dict.fromkeys([*former, *([own] if own is not None else [])]))
        self._made[version] = Version(code, flaws)
        return code

    def mend(self, state: State) -> UpdateRequested | None:
        """What somebody sends who has understood what is wrong, if nothing good is on its way."""
        waiting = [v for v, book in state.versions.items() if book.condition in WAITING]
        self._sent = [v for v in self._sent if v not in state.versions]
        if any(not self.flaws(v) for v in (*waiting, *self._sent)):
            return None
        code = self.make(state.version, tuple(waiting), None, mends=True)
        self._sent.append(code.version)
        return UpdateRequested(code=code, by="somebody", note="it is mended")

    def request(self, state: State, flaws: tuple[Flaw, ...]) -> UpdateRequested:
        """What somebody sends now, as the controller's server would hand it on."""
        rng = self._rng
        pending = [v for v, book in state.versions.items() if book.condition in WAITING]
        if rng.random() < KNOWS:
            pending += [v for v in self._sent if v not in state.versions]
        self._sent = [v for v in self._sent if v not in state.versions]
        own = rng.choice([None, *flaws])
        mends = own is None and rng.random() < 0.5
        code = self.make(state.version, tuple(pending), own, mends=mends)
        self._sent.append(code.version)
        urgent = rng.random() < 0.5
        return UpdateRequested(
            code=code,
            by="somebody",
            urgent=urgent,
            within_s=0.0 if urgent else rng.uniform(1.0, WITHIN_MAX_S),
            overlap=rng.choice([0, 0, 0, rng.randint(1, OVERLAP_MAX)]),
            untried=rng.random() < 0.1,
        )


def findings(error: RankError, speaker: Speaker, generation: Generation) -> tuple[Finding, ...]:
    """What its agent finds in the log of a rank that raised this, as agent/log_findings.py does."""
    people = People(Who(Site()), Ledger())
    reader = LogReader(f"rank-{speaker.rank}.log", _patterns(), people, generation)
    reader.feed(_TRACEBACK.format(kind=error.kind, message=error.message).encode())
    return tuple(
        replace(finding, speaker=speaker, attempt=generation) for finding in reader.new_findings()
    )


@cache
def _patterns() -> Patterns:
    return Patterns(own_rules(), Attentive)


_TRACEBACK = """Traceback (most recent call last):
  File "/code/train.py", line 41, in <module>
    main()
{kind}: {message}
"""
