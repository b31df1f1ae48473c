"""Code over HTTP: versions come in and go out, updates and rollbacks are asked for.

server.py mounts these endpoints behind the gate. The archive of a version streams into the
controller's store and is verified on the way; nothing of a body is ever in memory as a whole. An
update is decided here (accepting.py) and then told to the core, one at a time.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from everstep.code.manifest import CodeBroken, Manifest, encoded, is_version, problem_of, short
from everstep.code.snapshot import LIMITS, CodeTooLarge
from everstep.code.store import CodeStore
from everstep.controller.accepting import Asked, Draft, draft, known, objections
from everstep.controller.bodies import BodyFile, TooLong, decoded, limited_body
from everstep.controller.gate import json_response
from everstep.controller.lineage import Lineage
from everstep.controller.log import say
from everstep.controller.version_views import VersionsView, name_of
from everstep.core.history import Condition, VersionBook
from everstep.core.state import State
from everstep.core.versions import last_good
from everstep.events import ControllerEvent, RollbackRequested, UpdateRequested
from everstep.model import CodeVersion, Seconds, Value, VersionId

MANIFEST_BYTES_MAX = 16 << 20
"""Of 20,000 files with long names: a fifth of that."""
ARCHIVE_BYTES_MAX = LIMITS.total_bytes + MANIFEST_BYTES_MAX
BODY_BYTES_MAX = 1 << 20
"""Of a request without a manifest."""
THREADS = 8
"""Archives that come in, and versions that are put together, at the same time; others wait."""
UNCLAIMED_S: Seconds = 3600.0
"""So long a version may wait for the update that asks for it; then it is removed."""
_Answer = TypeVar("_Answer")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Accepted(Value, frozen=True, kw_only=True):
    """Answer to POST /v1/update."""

    name: str
    """v3; of a dry run what it would be called."""
    version: VersionId
    base: str
    """Name of what it is put on."""
    remarks: tuple[str, ...]
    changed: tuple[str, ...]
    """Files that differ from `base`; the first 100."""
    against_running: tuple[str, ...] = ()
    """Files that differ from what runs; only of a dry run."""
    objections: tuple[str, ...] = ()
    """Why it would be refused; only of a dry run, else that is an error."""


class RollBack(Value, frozen=True, kw_only=True):
    """Body of POST /v1/rollback."""

    by: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    note: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    to: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Name or id of a version; empty: the last one that ran well."""
    dry_run: bool = False


class RollsBack(Value, frozen=True, kw_only=True):
    """Answer to POST /v1/rollback."""

    name: str
    """Of the version that comes back."""
    version: VersionId
    running: str
    """Of the one that it takes the place of."""


class CodeDesk(NamedTuple):
    """What these endpoints ask the rest of the controller for."""

    state: State
    store: CodeStore
    versions: Callable[[], VersionsView]
    journalled: Callable[[Sequence[ControllerEvent]], Awaitable[None]]
    """Returns when the core was told and the journal has it."""


class _Unclaimed:
    """Versions that are here and belong to no update: sent, and refused, merged or left."""

    def __init__(self, desk: CodeDesk) -> None:
        self._desk = desk
        self._seen: dict[VersionId, Seconds] = {}
        self._began = time.monotonic()

    def seen(self, version: VersionId) -> None:
        """Somebody sends it or asks for it: its time begins anew."""
        self._seen[version] = time.monotonic()

    def removal(self) -> Callable[[], None]:
        """What to do in a thread, so that those whose time is over are gone."""
        state, now = self._desk.state, time.monotonic()
        first = () if state.spec is None else (state.spec.code.version,)
        sent = (book.code.sent for book in state.versions.values())
        claimed = {*state.versions, *first, *sent}
        since = dict(self._seen)

        def remove() -> None:
            for version in self._desk.store.versions():
                if version in claimed or now - since.get(version, self._began) < UNCLAIMED_S:
                    continue
                self._desk.store.discard(version)

        return remove

    def sweep(self) -> None:
        """In a thread: what a killed controller was writing or removing is gone."""
        store = self._desk.store
        try:
            store.keep(store.versions())
        except OSError as error:
            say(f"what is left over in {store.root} cannot be removed: {error}")


class CodeApi:
    """The endpoints."""

    def __init__(self, desk: CodeDesk) -> None:
        self._desk = desk
        self._store = desk.store
        self._one_at_a_time = asyncio.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "everstep-code")
        self._unclaimed = _Unclaimed(desk)
        self._threads.submit(self._unclaimed.sweep)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/code/{version}", self.receive, methods=["PUT"]),
            Route("/v1/code/{version}", self.send, methods=["GET"]),
            Route("/v1/code/{version}/manifest", self.manifest),
            Route("/v1/versions", self.versions),
            Route("/v1/update", self.update, methods=["POST"]),
            Route("/v1/rollback", self.rollback, methods=["POST"]),
        ]

    async def versions(self, _: Request) -> Response:
        return json_response(self._desk.versions())

    # --- archives ---

    async def receive(self, request: Request) -> Response:
        version = _version(request)
        said = request.headers.get("content-length", "")
        if said.isascii() and said.isdecimal() and int(said) > ARCHIVE_BYTES_MAX:
            raise HTTPException(413, _too_long())
        body = BodyFile(request, ARCHIVE_BYTES_MAX)
        self._unclaimed.seen(version)
        await self._in_thread(self._unclaimed.removal())
        try:
            await self._in_thread(lambda: self._store.receive(version, body))
        except ClientDisconnect:
            raise HTTPException(400, "the archive was cut short") from None
        except HTTPException:
            await _to_the_end(body)
            raise
        await _to_the_end(body)
        return json_response({"version": version})

    async def send(self, request: Request) -> Response:
        version = await self._here(request)
        size = await self._in_thread(lambda: self._store.size_of_archive(version))
        return StreamingResponse(
            self._store.chunks(version),
            media_type="application/octet-stream",
            headers={"content-length": str(size)},
        )

    async def manifest(self, request: Request) -> Response:
        version = await self._here(request)
        found = await self._in_thread(lambda: self._store.manifest(version))
        return Response(encoded(found), media_type="application/json")

    async def _here(self, request: Request) -> VersionId:
        version = _version(request)
        if not await self._in_thread(lambda: self._store.has(version)):
            raise HTTPException(404, f"the controller has no code version {short(version)}")
        self._unclaimed.seen(version)
        return version

    # --- updates ---

    async def update(self, request: Request) -> Response:
        asked = decoded(await limited_body(request, MANIFEST_BYTES_MAX), Asked)
        if not is_version(asked.version):
            raise HTTPException(400, f"{asked.version!r} is no code version: 64 hex digits")
        if asked.dry_run:
            return json_response(await self._dry_run(asked))
        async with self._one_at_a_time:
            return json_response(await self._accept(asked))

    async def _dry_run(self, asked: Asked) -> Accepted:
        theirs = asked.manifest
        if theirs is None or (problem := problem_of(theirs)) is not None:
            what = "is missing" if theirs is None else f"is bad: {problem}"
            raise HTTPException(400, f"a dry run needs a manifest, and it {what}")
        would = await self._drafted(asked, theirs)
        code = would.code or CodeVersion(version=asked.version, source=asked.source)
        return self._answer(code, would)

    async def _accept(self, asked: Asked) -> Accepted:
        self._refuse(objections(self._desk.state))
        self._unclaimed.seen(asked.version)
        if not await self._in_thread(lambda: self._store.has(asked.version)):
            raise HTTPException(
                409, f"code version {short(asked.version)} is not here: send it before the update"
            )
        theirs = await self._in_thread(lambda: self._store.manifest(asked.version))
        would = await self._drafted(asked, theirs)
        self._refuse(would.objections)
        assert would.code is not None, "there is no objection"
        self._unclaimed.seen(would.code.version)
        if would.merged_from:
            sources = (asked.version, *would.merged_from)
            await self._in_thread(lambda: self._store.add_manifest(would.manifest, sources))
        await self._desk.journalled([_request(asked, would.code, self._desk.state)])
        return self._answer(would.code, would)

    async def _drafted(self, asked: Asked, theirs: Manifest) -> Draft:
        kept: dict[VersionId, Manifest] = {}

        def manifest_of(version: VersionId) -> Manifest:
            if version not in kept:
                kept[version] = self._store.manifest(version)
            return kept[version]

        job = known(self._desk.state)
        return await self._in_thread(lambda: draft(asked, theirs, job, manifest_of))

    def _answer(self, code: CodeVersion, would: Draft) -> Accepted:
        versions = self._desk.state.versions
        number = versions[code.version].number if code.version in versions else len(versions) + 1
        base = versions.get(code.base)
        return Accepted(
            name=f"v{number}",
            version=code.version,
            base="" if base is None else f"v{base.number}",
            remarks=code.remarks,
            changed=code.changed,
            against_running=would.against_running,
            objections=would.objections,
        )

    def _refuse(self, against: Sequence[str]) -> None:
        if against:
            raise HTTPException(409, "; ".join(against))

    # --- rollbacks ---

    async def rollback(self, request: Request) -> Response:
        body = decoded(await limited_body(request, BODY_BYTES_MAX), RollBack)
        async with self._one_at_a_time:
            self._refuse(objections(self._desk.state))
            target = self._target(body.to)
            running = self._desk.state.versions.get(self._desk.state.version)
            if not await self._in_thread(lambda: self._store.has(target.code.version)):
                raise HTTPException(
                    409, f"the files of v{target.number} are not in the controller's store any more"
                )
            if not body.dry_run:
                event = RollbackRequested(by=body.by, note=body.note, version=target.code.version)
                await self._desk.journalled([event])
        answer = RollsBack(
            name=f"v{target.number}",
            version=target.code.version,
            running="" if running is None else f"v{running.number}",
        )
        return json_response(answer)

    def _target(self, text: str) -> VersionBook:
        state = self._desk.state
        lineage = Lineage(state.versions.values(), state.version)
        if not text:
            return _last_good(state)
        book = lineage.named(text)
        if book is None:
            raise HTTPException(409, f"there is no version {text}: the job has {_names(lineage)}")
        problem = _not_to(book, state)
        if problem:
            raise HTTPException(409, f"v{book.number} {problem}")
        return book

    async def _in_thread(self, work: Callable[[], _Answer]) -> _Answer:
        """Every error as the answer that it deserves."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (TooLong, CodeTooLarge) as error:
            raise HTTPException(413, str(error) or _too_long()) from error
        except TimeoutError as error:
            raise HTTPException(408, "the archive did not come: nothing for a minute") from error
        except CodeBroken as error:
            raise HTTPException(400, _sentence(error)) from error
        except OSError as error:
            why = error.strerror or str(error)
            where = f"the controller's store {self._store.root}"
            if error.errno in _NO_ROOM:
                sentence = f"{where} is full ({why}): make room there, then send it again"
                raise HTTPException(507, sentence) from error
            raise HTTPException(500, f"{where}: {why}") from error


def _request(asked: Asked, code: CodeVersion, state: State) -> UpdateRequested:
    within_s = state.job.policy.update_within_s if asked.within_s is None else asked.within_s
    return UpdateRequested(
        code=code,
        by=asked.by,
        note=asked.note,
        urgent=asked.urgent,
        within_s=0.0 if asked.urgent else within_s,
        overlap=asked.overlap,
        untried=asked.untried,
    )


def _last_good(state: State) -> VersionBook:
    """What a rollback leads to that names no version."""
    found = last_good(state)
    if found is None:
        raise HTTPException(
            409,
            f"there is nothing to roll back to: {name_of(state, state.version) or 'no version'}"
            " runs, and no earlier one ran well",
        )
    return found


def _not_to(book: VersionBook, state: State) -> str:
    """Why a person cannot have it back; empty if it can be had."""
    if book.code.version == state.version:
        return "is what runs"
    if book.condition is Condition.REFUSED:
        return f"is refused: {book.why}"
    return "" if book.runs else f"never ran: it is {book.condition}"


def _names(books: Iterable[VersionBook]) -> str:
    return ", ".join(f"v{book.number}" for book in books) or "none"


def _version(request: Request) -> VersionId:
    text = request.path_params["version"]
    if not is_version(text):
        raise HTTPException(400, f"{text[:80]!r} is no code version: that has 64 hex digits")
    return VersionId(text)


def _too_long() -> str:
    return (
        f"a code version may have {LIMITS.total_bytes >> 20} MiB in all: name what is no code in"
        " .everstepignore"
    )


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())


async def _to_the_end(body: BodyFile) -> None:
    """Also who sends too much, or what was no use, hears why."""
    try:
        await body.skip()
    except (ClientDisconnect, TimeoutError):
        return
