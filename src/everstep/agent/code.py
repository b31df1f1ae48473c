"""The code versions of this machine: gets them, keeps them, and says where one lies to be run.

Used by effects.py (HoldVersion, StartRanks, TryVersion) and shell.py. A version comes from another
machine's agent, else from the controller, and is compared with its id while it comes. Everything
that touches files or the network is done in a thread.

The job's first version is run from the user's own directories for as long as they hold it: then a
rank is what `python SCRIPT` would make of it, to the letter. Once a file there was changed it runs
from the store, as all later versions do, so what is edited in place changes nothing that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Collection
from functools import partial
from typing import BinaryIO, NamedTuple, cast

from everstep.actions import HoldVersion
from everstep.agent.code_http import download
from everstep.agent.in_place import InPlace
from everstep.agent.log import say
from everstep.agent.placing import Placed, Places
from everstep.agent.this_machine import ThisMachine
from everstep.agent.threads import Crew
from everstep.agent.transfer.channel import Cancel
from everstep.agent.transfer.client import Client, Way
from everstep.agent.transfer.messages import TransferFailed
from everstep.checkpoint.need import in_words
from everstep.code.manifest import CodeBroken, Manifest, short
from everstep.code.store import CodeStore
from everstep.events import VersionHeld, VersionNotHeld
from everstep.model import NO_VERSION, AgentAt, EverstepError, Seconds, VersionId

IN_PLACE_WITHIN_S: Seconds = 1.0
"""At a start, for seeing whether the code lies unchanged where it was: the store is always right,
so a slow file system is not waited for."""
READ_WITHIN_S: Seconds = 5.0
"""For reading all of it, when nobody waits."""


class NotHeld(EverstepError):
    """A code version is not on this machine, or cannot be read; the message says so."""


class _Read(NamedTuple):
    """What the store says of one version."""

    manifest: Manifest
    roots: tuple[str, ...]


class Lies(NamedTuple):
    """Where a version can be run on this machine."""

    roots: tuple[str, ...]
    places: Places
    manifest: Manifest


class Code:
    """Of one agent."""

    def __init__(self, here: ThisMachine, client: Client, store: CodeStore) -> None:
        self._here = here
        self._client = client
        self._store = store
        self._first = here.spec.code.version
        self._in_place = InPlace(here.spec.code.roots)
        self._crew = Crew(1)
        self._holding = asyncio.Lock()
        self._versions: tuple[VersionId, ...] = ()
        self._read: dict[VersionId, _Read] = {}

    @property
    def versions(self) -> tuple[VersionId, ...]:
        """Those that ranks could run now."""
        return self._versions

    def submitted(self, version: VersionId) -> None:
        """What the controller says that the job began with: it may lie where the user has it.

        It says nothing if it is of an older everstep, or the job has no versions.
        """
        self._first = version or self._first

    async def look(self, *, closely: bool) -> None:
        """See what a former agent left. `closely`: read it, since the host may have lost power."""
        self._versions = await asyncio.to_thread(partial(self._look, closely=closely))

    async def look_ahead(self) -> None:
        """Read now what the next start asks for: then it need only look."""
        if self._first in self._versions:
            with contextlib.suppress(NotHeld):
                await self.find(self._first)

    def _look(self, *, closely: bool) -> tuple[VersionId, ...]:
        try:
            if closely:
                self._discard_broken()
            return self._store.versions()
        except OSError as error:
            say(f"the code versions in {self._store.root} cannot be read: {error}")
            return ()

    def _discard_broken(self) -> None:
        for version in self._store.versions():
            try:
                self._store.verify(version)
            except CodeBroken as error:
                say(f"{error} It is fetched again when it is needed.")
                self._store.discard(version)

    # --- getting one ---

    async def hold(self, order: HoldVersion, running: VersionId) -> VersionHeld | VersionNotHeld:
        """Have it here. What `running` and the order name is kept, everything else removed."""
        machine, version = self._here.setup.machine, order.version
        cancel = Cancel()
        try:
            async with asyncio.timeout(order.within_s), self._holding:
                deadline = time.monotonic() + order.within_s
                bring = partial(self._bring, order, cancel, deadline)
                (came,) = await self._crew.all([bring], cancel)
                if came:
                    say(f"code version {short(version)}: {came}")
                keep = {version, running, self._first, *order.keep}
                self._versions = await asyncio.to_thread(self._tidy, keep, version)
        except TimeoutError:
            reason = f"it could not be had within {order.within_s:g} s"
        except EverstepError as error:
            reason = str(error)
        except OSError as error:
            reason = f"it cannot be written to {self._store.root}: {error.strerror or error}"
        else:
            return VersionHeld(machine=machine, action=order.id, version=version)
        return VersionNotHeld(machine=machine, action=order.id, version=version, reason=reason)

    def _bring(self, order: HoldVersion, cancel: Cancel, deadline: Seconds) -> str:
        """In a thread; from where it came, for the log, empty if it was here.

        Raises TransferFailed, CodeBroken, OSError.
        """
        version, store = order.version, self._store
        if store.has(version):
            return ""
        began = time.monotonic()
        for source in order.sources:
            try:
                self._from_agent(source, version, cancel)
            except (TransferFailed, CodeBroken) as error:
                cancel.wait(0)
                say(f"code version {short(version)} did not come from {source.machine}: {error}")
            else:
                return self._came(version, source.machine, began)
        download(self._here, version, partial(store.receive, version), Way(cancel), deadline)
        return self._came(version, "the controller", began)

    def _came(self, version: VersionId, source: str, began: Seconds) -> str:
        size = in_words(self._store.size_of_archive(version))
        return f"{size} from {source} in {time.monotonic() - began:.3f} s"

    def _from_agent(self, source: AgentAt, version: VersionId, cancel: Cancel) -> None:
        """By way of a file without a name: what is received is read from its beginning."""
        with tempfile.TemporaryFile(dir=self._here.paths.root) as archive:
            sink = cast("BinaryIO", archive)
            self._client.fetch_code(source, version, sink, Way(cancel))
            sink.seek(0)
            self._store.receive(version, sink)

    def _tidy(self, keep: Collection[VersionId], version: VersionId) -> tuple[VersionId, ...]:
        """In a thread: drop what nobody will ask for, and look ahead at what a start will ask."""
        try:
            self._store.keep([each for each in keep if each != NO_VERSION])
        except OSError as error:
            say(f"old code versions in {self._store.root} cannot be removed: {error}")
        held = self._store.versions()
        self._read = {each: read for each, read in self._read.items() if each in held}
        manifest = self._read_once(version).manifest
        if version == self._first:
            self._in_place.holds(manifest, READ_WITHIN_S)
        return held

    # --- running one ---

    async def find(self, version: VersionId) -> Lies:
        """Where this version is run on this machine. Raises NotHeld."""
        try:
            return await asyncio.to_thread(self._find, version)
        except (CodeBroken, OSError) as error:
            if isinstance(error, CodeBroken):
                await self._lose(version)
            raise NotHeld(
                f"code version {short(version)} is not on this machine or cannot be read: {error}"
            ) from error

    async def _lose(self, version: VersionId) -> None:
        """It is not what it was: so that it can be fetched again."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._store.discard, version)
            self._versions = await asyncio.to_thread(self._store.versions)

    def _find(self, version: VersionId) -> Lies:
        manifest, roots = self._read_once(version)
        originals = self._here.spec.code.roots
        if version == self._first and self._in_place.holds(manifest, IN_PLACE_WITHIN_S):
            return Lies(originals, (), manifest)
        pairs = zip(originals, roots, strict=False)
        places = tuple(Placed(root=root, now=now) for root, now in pairs)
        return Lies(roots, places, manifest)

    def _read_once(self, version: VersionId) -> _Read:
        """A manifest of thousands of files takes too long for every start. CodeBroken, OSError."""
        if version not in self._read or not self._store.has(version):
            roots = tuple(map(str, self._store.roots(version)))
            self._read[version] = _Read(self._store.manifest(version), roots)
        return self._read[version]

    async def places(self, version: VersionId) -> Places:
        """What to move for ranks that run it. Raises NotHeld."""
        return () if version == NO_VERSION else (await self.find(version)).places

    async def first(self) -> Manifest | None:
        """What is in the version that the job was submitted with; None if it is not here."""
        try:
            return (await asyncio.to_thread(self._read_once, self._first)).manifest
        except (CodeBroken, OSError):
            return None

    async def remove_all(self) -> None:
        """The machine leaves: nothing of ours stays on it."""
        self._crew.close()
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._store.keep, ())
