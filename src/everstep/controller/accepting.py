"""Whether an update can be accepted, and what it becomes: merged, compared, with its remarks.

Pure but for the manifests that it asks for. code.py calls it for a real update and, with nothing
stored and nothing posted, for a dry run: both hear the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from everstep.code.manifest import CodeBroken, Entry, Manifest, changed, shown, version_of
from everstep.code.merge import Conflicts, merge
from everstep.code.requirements import requirement_files
from everstep.controller.lineage import Lineage
from everstep.controller.version_views import failure_of
from everstep.core.history import Condition, VersionBook
from everstep.core.state import State
from everstep.core.versions import WAITING
from everstep.model import (
    NO_VERSION,
    CodeOrigin,
    CodeVersion,
    JobSpec,
    Seconds,
    Value,
    VersionId,
)

CHANGED_MAX = 100
"""Files that are named of one version; the others are in its manifest."""
NAMED_MAX = 5
"""Files that are named in one sentence."""
Manifests = Callable[[VersionId], Manifest]
_Text = Annotated[str, msgspec.Meta(max_length=2000)]


class Asked(Value, frozen=True, kw_only=True):
    """Body of POST /v1/update."""

    version: VersionId
    """What was sent before with PUT /v1/code/VERSION."""
    given: tuple[int, ...] = (0,)
    """Source roots that are in it; the others stay as they are, and are empty there."""
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    origin: CodeOrigin = CodeOrigin()
    ancestors: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = ()
    """Of the commits that the job's versions came from, those that this code contains."""
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    note: _Text = ""
    urgent: bool = True
    within_s: Annotated[Seconds, msgspec.Meta(ge=0)] | None = None
    """Of a lazy one; None: as the job's policy says."""
    overlap: Annotated[int, msgspec.Meta(ge=0)] = 0
    exact: bool = False
    """Put it in place as it is: nothing is merged."""
    again: bool = False
    """Even if it is exactly what was rolled back."""
    untried: bool = False
    dry_run: bool = False
    manifest: Manifest | None = None
    """For a dry run: what would be sent."""


class Draft(NamedTuple):
    """What an update would become."""

    objections: tuple[str, ...]
    """Why it is refused; nothing of the rest counts then."""
    manifest: Manifest = Manifest()
    version: VersionId = VersionId("")
    merged_from: tuple[VersionId, ...] = ()
    """It is not exactly what was sent: it has to be put together of these and that."""
    code: CodeVersion | None = None
    against_running: tuple[str, ...] = ()
    """Files that differ from what runs."""


class Known(NamedTuple):
    """What the core knows at one moment: for a thread that must not read it while it changes."""

    spec: JobSpec
    lineage: Lineage
    objections: tuple[str, ...]
    failures: dict[VersionId, str]
    """What versions were rolled back for."""


def known(state: State) -> Known:
    """To be called where the core is: in the event loop."""
    lineage = Lineage(state.versions.values(), state.version)
    failures = {book.code.version: failure_of(state, book) for book in lineage}
    return Known(state.job, lineage, tuple(objections(state)), failures)


def objections(state: State) -> list[str]:
    """Why no update at all can be accepted now."""
    if state.finish is not None:
        return [f"the job is over ({state.finish.outcome}): {state.finish.why}"]
    spec = state.job
    if not spec.code.version:
        why = spec.code.why_none or "it was submitted by an everstep that keeps no code"
        return [f"the code of this job is not versioned: {why}; stop it and start it anew"]
    old = [m.machine for m in state.members() if m.versions is None]
    if old:
        agents = "the agent" if len(old) == 1 else "each agent"
        return [
            f"{agents} of {_some(old)} is of an everstep that cannot change code: start it anew"
        ]
    return []


def draft(asked: Asked, theirs: Manifest, job: Known, manifests: Manifests) -> Draft:
    """What the update becomes."""
    if job.objections:
        return Draft(job.objections)
    lineage = job.lineage
    head, running = lineage.head(), lineage.running
    if head is None or running is None:
        return Draft(("the job does not know its own code yet: ask again in a moment",))
    base = lineage.base(head, asked.origin, asked.ancestors) or head
    ours, from_there = manifests(head.code.version), _as_sent(base.code, manifests)
    problem = _wrong_roots(asked, theirs, job.spec)
    if problem:
        return Draft((problem,))
    whole = _with_roots(theirs, from_there, asked.given)
    result = whole if asked.exact else merge(from_there, ours, whole)
    if isinstance(result, Conflicts):
        # Its author may not have what was merged into `base` either.
        behind = [book for book in lineage.of(head) if book is not base]
        others = behind if base.code.sent else lineage.between(head, base)
        return Draft((_conflict(result.paths, others, manifests),))
    now = _Change(asked, job, head, base, result, manifests)
    code = now.code()
    return Draft(
        objections=tuple(now.objections()),
        manifest=result,
        version=code.version,
        merged_from=() if code.version == asked.version else (head.code.version, base.code.version),
        code=code,
        against_running=changed(manifests(running.code.version), result),
    )


def _wrong_roots(asked: Asked, theirs: Manifest, spec: JobSpec) -> str:
    count = len(spec.code.roots)
    given = set(asked.given)
    if len(theirs.roots) != count or not given or not given <= set(range(count)):
        return (
            f"the job has {count} source roots and the update has {len(theirs.roots)}, of which it"
            f" names {sorted(given)}: it was made for another job"
        )
    return ""


def _as_sent(code: CodeVersion, manifests: Manifests) -> Manifest:
    """What the author of this version had: others' changes that were merged into it are not there,
    and who sends the same directory again does not mean to take them back.
    """
    whole = manifests(code.version)
    if not code.sent:
        return whole
    try:
        sent = manifests(code.sent)
    except CodeBroken:  # it is not here any more
        return whole
    # A root that was not given is empty in what was sent.
    pairs = zip(sent.roots, whole.roots, strict=True)
    return Manifest(roots=tuple(own or merged for own, merged in pairs))


def _with_roots(theirs: Manifest, base: Manifest, given: Sequence[int]) -> Manifest:
    roots = enumerate(zip(theirs.roots, base.roots, strict=True))
    return Manifest(roots=tuple(new if n in given else old for n, (new, old) in roots))


def _conflict(paths: Sequence[str], others: Sequence[VersionBook], manifests: Manifests) -> str:
    who = [book for book in others if not set(paths).isdisjoint(_changed_by(book, manifests))]
    names = ", ".join(f"v{book.number} of {book.by or 'somebody'}" for book in who)
    also = names or "the code that it is put on"
    return (
        f"{_some(paths)} {_was(paths)} changed by {also} as well, in another way: take those"
        " changes into your code, or send it with --exact, which leaves theirs out"
    )


def _changed_by(book: VersionBook, manifests: Manifests) -> tuple[str, ...]:
    """Files that this version changed. One that is not here any more: those that are known."""
    if len(book.code.changed) < CHANGED_MAX or not book.code.base:
        return book.code.changed
    return changed(manifests(book.code.base), manifests(book.code.version))


class _Change(NamedTuple):
    """What comes out of an update, and what it comes to."""

    asked: Asked
    job: Known
    head: VersionBook
    base: VersionBook
    result: Manifest
    manifests: Manifests

    def code(self) -> CodeVersion:
        files = self._changed
        waits = self.head.condition in WAITING
        includes = (*self.head.code.includes, self.head.code.version) if waits else ()
        version = version_of(self.result)
        return CodeVersion(
            version=version,
            sent=NO_VERSION if version == self.asked.version else self.asked.version,
            source=self.asked.source,
            files=self.result.files,
            size_bytes=self.result.size_bytes,
            base=self.head.code.version,
            includes=includes,
            changed=files[:CHANGED_MAX],
            requirements=requirement_files(files),
            remarks=tuple(self._remarks()),
            origin=self.asked.origin,
        )

    @property
    def lineage(self) -> Lineage:
        return self.job.lineage

    def objections(self) -> list[str]:
        """Why it is refused although it can be put together."""
        spec = self.job.spec
        found = []
        version = version_of(self.result)
        known = self.lineage.find(version)
        if known is not None and known in (self.head, self.lineage.running):
            what = "waits" if known.condition in WAITING else "runs"
            found.append(f"nothing changes: it is the same as v{known.number}, which {what}")
        missing = self._missing_script(spec)
        if missing:
            found.append(
                f"{missing}, which the job runs, is not in it: give the directory that"
                f" corresponds to {spec.code.roots[0]}"
            )
        if known is not None and known.condition is Condition.ROLLED_BACK and not self.asked.again:
            found.append(
                f"it is exactly v{known.number}, which was rolled back{_when(known)}"
                f"{self._because(known)}: change what was wrong, or send it with --again"
            )
        return found

    @property
    def _changed(self) -> tuple[str, ...]:
        return changed(self.manifests(self.head.code.version), self.result)

    def _remarks(self) -> list[str]:
        found = [self._based_on()]
        files = requirement_files(self._changed)
        if files:
            found.append(
                f"{_some(files)} changed: an update does not install anything; what is new there"
                " must be on every machine already"
            )
        found += [self._contained(book) for book in self.lineage.rolled_back()]
        return [remark for remark in found if remark]

    def _based_on(self) -> str:
        head = self.head
        how = "which waits" if head.condition in WAITING else "which runs"
        latest = next(iter(self.lineage.rolled_back()), None)
        if latest is not None and head.condition not in WAITING and latest.event > head.event:
            how = f"which runs since v{latest.number} was rolled back{_when(latest)}"
        if self.asked.exact:
            return f"it replaces v{head.number}, {how}, as a whole"
        kept = [b for b in self.lineage.between(head, self.base) if b is not self.base]
        also = f"; changes of {_names(kept)} stay in it" if kept else ""
        return f"it is based on v{head.number}, {how}{also}"

    def _contained(self, bad: VersionBook) -> str:
        """Which changes that were rolled back come back with it."""
        if not bad.code.base:
            return ""
        theirs, before = self.manifests(bad.code.version), self.manifests(bad.code.base)
        bads, results = _flat(theirs), _flat(self.result)
        ours = _flat(self.manifests(self.head.code.version))
        paths = [
            path
            for path in changed(before, theirs)
            if results.get(path) == bads.get(path) != ours.get(path)
        ]
        if not paths:
            return ""
        return (
            f"it contains {_some(paths)} as v{bad.number} had {'it' if len(paths) == 1 else 'them'}"
            f", which was rolled back{_when(bad)}{self._because(bad)}"
        )

    def _because(self, book: VersionBook) -> str:
        why = self.job.failures.get(book.code.version) or book.why
        return f" ({why})" if why else ""

    def _missing_script(self, spec: JobSpec) -> str:
        """What the job runs, if an earlier version has it and this one does not."""
        first = self.lineage.first
        before = first.code.version if first is not None else self.head.code.version
        then, now = _flat(self.manifests(before)), _flat(self.result)
        paths = [path for path in script_paths(spec) if path in then]
        return paths[0] if paths and not any(path in now for path in paths) else ""


def script_paths(spec: JobSpec) -> list[str]:
    """Where in its source roots the job's script or module may be, as people read it."""
    if spec.no_python or not spec.command:
        return []
    named = spec.command[0]
    inner = named.replace(".", "/")
    names = (f"{inner}.py", f"{inner}/__main__.py") if spec.module else (named,)
    places = [os.path.realpath(Path(spec.working_dir) / name) for name in names]
    roots = [os.path.realpath(root).rstrip("/") + "/" for root in spec.code.roots]
    return [
        shown(number, place.removeprefix(root))
        for place in places
        for number, root in enumerate(roots)
        if place.startswith(root)
    ]


def _flat(manifest: Manifest) -> dict[str, Entry]:
    """All entries, by their paths as people read them."""
    return {
        shown(number, entry.path): entry
        for number, root in enumerate(manifest.roots)
        for entry in root
    }


# --- words ---------------------------------------------------------------------------------------


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMED_MAX
    listed = ", ".join(names[:NAMED_MAX])
    return f"{listed} and {rest} more" if rest > 0 else listed


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _names(books: Sequence[VersionBook]) -> str:
    return ", ".join(f"v{b.number}" + (f" ({b.by})" if b.by else "") for b in books)


def _when(book: VersionBook) -> str:
    """Of a version that was rolled back: when that was, in the controller's own time zone."""
    until = book.runs[-1].until if book.runs else None
    return "" if until is None else time.strftime(" on %d %b at %H:%M", time.localtime(until))
