"""The remote tier: whole steps in an object store or whatever else fsspec reaches.

    URL/step-N/gen-G/rank-R.shard     as in a directory (disk.py), in slices where ranks share
    URL/step-N/manifest.json          written last, when every rank's shard is there: published

There are no renames and no locks in an object store. So the shards of each generation have names of
their own, nothing is ever changed in place, and the one manifest is written with "only if there is
none" where the store has that: a writer of an older generation that comes late publishes nothing,
and overwrites nothing that is published. Used through tier.py; errors of whatever kind the store's
package raises become TierFailed.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import msgspec

from everstep.checkpoint import format as shards
from everstep.checkpoint import slices, slots
from everstep.checkpoint.disk import KEEP_MIN, MANIFEST, WHOLE, Manifest, why_whole
from everstep.checkpoint.format import CHUNK_BYTES, PAGE, Expected, Header, Shard, ShardBad
from everstep.checkpoint.slices import ReplicasDiffer
from everstep.checkpoint.slots import ShardLost, ShardMissing
from everstep.checkpoint.tier import TierFailed
from everstep.model import EverstepError, Generation, Published, Rank, Step

READERS = 4
"""Pieces of a shard that are read at once: one stream of an object store is slow."""
ATTEMPTS = 3
"""To replace the manifest of an older generation, should others do so at the same time."""
_STEP = re.compile(r"step-(\d+)")
_GENERATION = re.compile(r"gen-(\d+)")


class RemoteTier:
    """Of one URL. Every call may take as long as the store's package lets it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with self._failing("be opened"):
            self._fs, root = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
            self._root = str(root).rstrip("/")

    # --- the agent's side ------------------------------------------------------------------------

    def persist(self, shm: Path, rank: Rank, step: Step) -> None:
        """As in tier.py."""
        shard = slots.find(shm, Expected(step=step, rank=rank))
        path = self._shard(step, shard.header.generation, rank)
        with self._failing(f"take rank {rank}'s shard of step {step}"):
            chunks = slices.chunks_of(shard, whole=self._fs.exists(f"{self._root}/{WHOLE}"))
            self._write(path, shard.header, chunks)
        if not slots.unchanged(shm, shard.header):
            self._remove(path)
            raise ShardLost(f"rank {rank} overwrote step {step} while it was copied to {self._url}")

    def _write(self, path: str, header: Header, chunks: list[memoryview]) -> None:
        header = msgspec.structs.replace(header, payload_bytes=sum(map(len, chunks)))
        crc = functools.reduce(lambda crc, chunk: shards.crc_of(chunk, crc), chunks, 0)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            file.write(shards.header_page(header, crc))
            for chunk in chunks:
                for at in range(0, len(chunk), CHUNK_BYTES):
                    file.write(chunk[at : at + CHUNK_BYTES])

    # --- the controller's side -------------------------------------------------------------------

    def publish(self, published: Published, world_size: int, keep: int) -> None:
        """As in tier.py."""
        with self._failing(f"publish step {published.step}"):
            sizes = self._complete(published, world_size)
            manifest = Manifest(
                step=published.step,
                generation=published.generation,
                world_size=world_size,
                payload_bytes=sizes,
                replicas=self._check_replicas(published, sizes),
            )
            self._point_to(manifest)
            self._retain(published, max(keep, KEEP_MIN))

    def published(self) -> list[Published]:
        """As in tier.py."""
        with self._failing("be listed"):
            found = []
            for step in self._steps():
                manifest = self._manifest(step)
                if manifest is not None and self._sizes_match(manifest):
                    found.append(Published(step=step, generation=manifest.generation))
            return found

    def manifest(self, step: Step) -> Manifest:
        """As in tier.py."""
        with self._failing(f"tell of step {step}"):
            found = self._manifest(step)
        if found is None:
            raise ShardMissing(f"step {step} is not published in {self._url}")
        return found

    def withdraw(self, step: Step) -> None:
        """As in tier.py."""
        self._remove(self._pointer(step))

    def _complete(self, published: Published, world_size: int) -> tuple[int, ...]:
        """Payload sizes of all ranks' shards. Raises ShardMissing or ShardBad."""
        step, generation = published.step, published.generation
        paths = [self._shard(step, generation, Rank(rank)) for rank in range(world_size)]
        sizes = self._sizes(step, generation)
        for path in paths:
            if path not in sizes:
                raise ShardMissing(f"{path} is missing: step {step} is not complete")
        found = []
        for rank, page in enumerate(self._fs.cat_ranges(paths, 0, PAGE, on_error="raise")):
            header = shards.read_header(memoryview(bytearray(page)))
            if header is None or sizes[paths[rank]] != PAGE + header.payload_bytes:
                raise ShardBad(f"{paths[rank]} is truncated or no shard")
            wanted = Expected(
                step=step, rank=Rank(rank), generation=generation, world_size=world_size
            )
            shards.check_header(header, wanted, paths[rank])
            found.append(header.payload_bytes)
        return tuple(found)

    def _check_replicas(
        self, published: Published, sizes: tuple[int, ...]
    ) -> tuple[tuple[Rank, ...], ...]:
        """As in disk.py."""
        heads = self._heads(published, sizes)
        try:
            return slices.sets_of(heads)
        except ReplicasDiffer as error:
            why = why_whole(published.step, error)
            self._fs.pipe_file(f"{self._root}/{WHOLE}", why)
            raise

    def _heads(
        self, published: Published, sizes: tuple[int, ...]
    ) -> dict[Rank, slices.PartHead | None]:
        """Of each rank's file: no more than that is read."""
        step, generation = published.step, published.generation
        paths = [self._shard(step, generation, Rank(rank)) for rank in range(len(sizes))]
        starts = self._fs.cat_ranges(paths, PAGE, PAGE + PAGE, on_error="raise")
        lengths = [slices.head_bytes(memoryview(start)) for start in starts]
        ends = [PAGE + max(length, 1) for length in lengths]
        found = self._fs.cat_ranges(paths, [PAGE] * len(paths), ends, on_error="raise")
        return {
            Rank(rank): slices.head_of(memoryview(head), size) if length else None
            for rank, (head, length, size) in enumerate(zip(found, lengths, sizes, strict=True))
        }

    def _point_to(self, manifest: Manifest) -> None:
        """Write the step's manifest unless a newer generation has."""
        path = self._pointer(manifest.step)
        content = msgspec.json.format(msgspec.json.encode(manifest))
        for _ in range(ATTEMPTS):
            try:
                self._fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                there = self._manifest(manifest.step)
                if there is not None and there.generation > manifest.generation:
                    raise TierFailed(
                        f"step {manifest.step} of generation {manifest.generation} came too late:"
                        f" generation {there.generation} has published it"
                    ) from None
                if there == manifest:
                    return
                self._fs.rm_file(path)
            else:
                return
        raise TierFailed(f"somebody else publishes step {manifest.step} at the same time")

    def _retain(self, newest: Published, keep: int) -> None:
        """Remove what nobody needs: older steps, and other generations' shards of this one."""
        complete = [step for step in self._steps() if self._manifest(step) is not None]
        kept = set(complete[-keep:])
        for step in self._steps():
            if step < newest.step and step not in kept:
                self.withdraw(step)
                self._remove(self._step(step), recursive=True)
        for path in self._names(self._step(newest.step)):
            match = _GENERATION.fullmatch(path.rpartition("/")[2])
            if match and int(match[1]) < newest.generation:
                self._remove(path, recursive=True)

    # --- the rank's side -------------------------------------------------------------------------

    def read(self, expected: Expected) -> Shard:
        """As in tier.py. The payload is in memory of its own."""
        with self._failing(f"give rank {expected.rank}'s shard of step {expected.step}"):
            manifest = self._manifest(expected.step)
            if manifest is None:
                raise ShardMissing(f"step {expected.step} is not published in {self._url}")
            open_file = functools.partial(self._open_file, manifest.generation)
            return slices.whole(open_file(expected), open_file)

    def _open_file(self, generation: Generation, expected: Expected) -> Shard:
        path = self._shard(expected.step, generation, expected.rank)
        try:
            size = int(self._fs.info(path)["size"])
        except FileNotFoundError as error:
            raise ShardMissing(f"{path} is missing") from error
        if size == 0:
            raise ShardBad(f"{path} is empty")
        return shards.open_shard(self._load(path, size), expected, path)

    def _load(self, path: str, size: int) -> mmap.mmap:
        mapping = mmap.mmap(-1, size)

        def load(at: int) -> None:
            chunk = self._fs.cat_file(path, start=at, end=min(at + CHUNK_BYTES, size))
            mapping[at : at + len(chunk)] = chunk

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(load, range(0, size, CHUNK_BYTES)))
        return mapping

    # --- names and listings ----------------------------------------------------------------------

    def _step(self, step: Step) -> str:
        return f"{self._root}/step-{step}"

    def _pointer(self, step: Step) -> str:
        return f"{self._step(step)}/{MANIFEST}"

    def _shard(self, step: Step, generation: Generation, rank: Rank) -> str:
        return f"{self._step(step)}/gen-{generation}/rank-{rank}.shard"

    def _steps(self) -> list[Step]:
        names = (path.rpartition("/")[2] for path in self._names(self._root))
        return sorted(Step(int(match[1])) for name in names if (match := _STEP.fullmatch(name)))

    def _names(self, directory: str) -> list[str]:
        return [str(entry["name"]).rstrip("/") for entry in self._list(directory)]

    def _sizes(self, step: Step, generation: Generation) -> dict[str, int]:
        entries = self._list(f"{self._step(step)}/gen-{generation}")
        return {str(entry["name"]): int(entry["size"] or 0) for entry in entries}

    def _list(self, directory: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(directory, detail=True))
        except FileNotFoundError:
            return []

    def _manifest(self, step: Step) -> Manifest | None:
        try:
            return msgspec.json.decode(self._fs.cat_file(self._pointer(step)), type=Manifest)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _sizes_match(self, manifest: Manifest) -> bool:
        sizes = self._sizes(manifest.step, manifest.generation)
        paths = [
            self._shard(manifest.step, manifest.generation, Rank(rank))
            for rank in range(manifest.world_size)
        ]
        wanted = [PAGE + size for size in manifest.payload_bytes]
        return [sizes.get(path) for path in paths] == wanted

    def _remove(self, path: str, *, recursive: bool = False) -> None:
        with self._failing("remove what is not needed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=recursive)

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except EverstepError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise TierFailed(f"{self._url} could not {doing}: {why}") from error
