"""The disk tier: whole steps in the checkpoint directory, for the loss of a machine.

    DIRECTORY/step-N/rank-R.shard     the same bytes as the slot in memory, and a checksum; of
                                      tensors that other ranks hold too, only a slice (slices.py)
    DIRECTORY/step-N/manifest.json    written last, when every rank's shard is there: published

Agents persist shards, the controller publishes steps, ranks read them. Everything is written under
a temporary name, fsynced and renamed, so a crash at any moment leaves whole files or leftovers that
the next publish() removes. A step without manifest does not exist. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from everstep.checkpoint import format as shards
from everstep.checkpoint import slices, slots
from everstep.checkpoint.format import CHUNK_BYTES, PAGE, Expected, Header, Shard, ShardBad
from everstep.checkpoint.slices import ReplicasDiffer
from everstep.checkpoint.slots import ShardLost, ShardMissing
from everstep.model import Generation, Published, Rank, Step, Value

MANIFEST = "manifest.json"
WHOLE = "write-whole"
"""A file in DIRECTORY that says why slices are not to be relied on, if so."""
KEEP_MIN = 2
"""Published steps that are kept whatever was asked for: the newest one may be published while the
one before it is just being restored."""
_STEP = re.compile(r"step-(\d+)")


class Manifest(Value, frozen=True, kw_only=True):
    """Content of manifest.json."""

    step: Step
    generation: Generation
    world_size: int
    payload_bytes: tuple[int, ...]
    """Of every rank's file, in rank order."""
    replicas: tuple[tuple[Rank, ...], ...] = ()
    """Ranks that wrote slices of the same tensors. Of a tensor of B bytes, the one at position P of
    N wrote those from P to P + 1 times B / N, rounded up to 64."""


def step_dir(directory: Path, step: Step) -> Path:
    return directory / f"step-{step}"


def shard_path(directory: Path, step: Step, rank: Rank) -> Path:
    return step_dir(directory, step) / f"rank-{rank}.shard"


# --- the agent's side ----------------------------------------------------------------------------


def persist(shm: Path, rank: Rank, step: Step, directory: Path) -> Path:
    """Copy the rank's shard of this step to disk, fsynced; the path is its file.

    Raises ShardMissing (not saved yet), ShardLost (overwritten, also while it was being copied),
    OSError (disk full, read-only). What was damaged in memory before is found by its digest when it
    is restored.
    """
    shard = slots.find(shm, Expected(step=step, rank=rank))
    _withdraw_other(directory, step, shard.header.generation)
    chunks = slices.chunks_of(shard, whole=(directory / WHOLE).exists())
    return copy_shard(shm, shard, directory, chunks, _go_on)


def _go_on() -> None:
    pass


def copy_shard(
    shm: Path,
    shard: Shard,
    directory: Path,
    chunks: Sequence[memoryview],
    go_on: Callable[[], None],
) -> Path:
    """Write a slot's shard below `directory`, as these chunks. Raises as persist() does.

    `go_on` is called before every chunk, and may raise to end it: nothing is left then.
    """
    path = shard_path(directory, shard.header.step, shard.header.rank)
    _make_dir(path.parent)
    temporary = path.with_suffix(".tmp")
    try:
        _write_shard(temporary, shard.header, chunks, go_on)
        _check_kept(shm, shard.header)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_dir(path.parent)
    return path


def _check_kept(shm: Path, header: Header) -> None:
    """What was written is what the rank committed, if that is still there."""
    if not slots.unchanged(shm, header):
        raise ShardLost(
            f"rank {header.rank} overwrote step {header.step} while it was copied to disk"
        )


def _write_shard(
    path: Path, header: Header, chunks: Sequence[memoryview], go_on: Callable[[], None]
) -> None:
    """Write and fsync the file."""
    header = msgspec.structs.replace(header, payload_bytes=sum(map(len, chunks)))
    crc = 0
    with path.open("wb", buffering=0) as file:
        file.write(b"\0" * PAGE)
        for piece in chunks:
            for at in range(0, len(piece), CHUNK_BYTES):
                go_on()
                chunk = piece[at : at + CHUNK_BYTES]
                crc = zlib.crc32(chunk, crc)
                _write_all(file.fileno(), chunk)
        os.pwrite(file.fileno(), shards.header_page(header, crc), 0)
        os.fsync(file.fileno())


def _write_all(fd: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(fd, chunk) :]


def _withdraw_other(directory: Path, step: Step, generation: Generation) -> None:
    """A step computed anew replaces the published one: its manifest must not lie meanwhile."""
    manifest = _read_manifest(step_dir(directory, step))
    if manifest is not None and manifest.generation != generation:
        withdraw(directory, step)


# --- the controller's side -----------------------------------------------------------------------


def publish(
    directory: Path, step: Step, generation: Generation, world_size: int, keep: int
) -> None:
    """Declare the step complete, then remove published steps beyond `keep` and older leftovers.

    Raises ShardMissing or ShardBad if a rank's shard is not there or is another one, or if ranks
    that wrote slices of the same tensors did not have the same (then the next step is written
    whole), OSError if the disk refuses. The payloads were checked when they were written and are
    checked when restored.
    """
    headers = [
        _header_on_disk(
            shard_path(directory, step, Rank(rank)),
            Expected(step=step, rank=Rank(rank), generation=generation, world_size=world_size),
        )
        for rank in range(world_size)
    ]
    manifest = Manifest(
        step=step,
        generation=generation,
        world_size=world_size,
        payload_bytes=tuple(header.payload_bytes for header in headers),
        replicas=_check_replicas(directory, step, world_size),
    )
    place = step_dir(directory, step)
    _write_atomically(place / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    _sync_dir(directory)
    _retain(directory, max(keep, KEEP_MIN))


def _check_replicas(directory: Path, step: Step, world_size: int) -> tuple[tuple[Rank, ...], ...]:
    """The sets of ranks that wrote slices. Raises ShardBad if what they had was not the same."""
    heads = {}
    for rank in map(Rank, range(world_size)):
        heads[rank] = slices.head_of(open_file(directory, Expected(step=step, rank=rank)).payload)
    try:
        return slices.sets_of(heads)
    except ReplicasDiffer as error:
        _write_atomically(directory / WHOLE, why_whole(step, error))
        raise


def why_whole(step: Step, error: ReplicasDiffer) -> bytes:
    """Content of the file WHOLE: what happened, for people."""
    return f"step {step}: {error}\n".encode()


def published(directory: Path) -> list[Published]:
    """Complete steps, oldest first. Unreadable or incomplete ones do not count."""
    found = []
    for step in steps_in(directory):
        place = step_dir(directory, step)
        manifest = _read_manifest(place)
        if manifest is not None and manifest.step == step and _sizes_match(place, manifest):
            found.append(Published(step=step, generation=manifest.generation))
    return found


def manifest_of(directory: Path, step: Step) -> Manifest:
    """What a published step says about itself. Raises ShardMissing if it is not published."""
    manifest = _read_manifest(step_dir(directory, step))
    if manifest is None:
        raise ShardMissing(f"step {step} is not published in {directory}")
    return manifest


def withdraw(directory: Path, step: Step) -> None:
    """Take a publication back: a shard of it turned out to be bad. The files stay, for people."""
    with contextlib.suppress(FileNotFoundError):
        (step_dir(directory, step) / MANIFEST).unlink()


def _retain(directory: Path, keep: int) -> None:
    complete = [item.step for item in published(directory)]
    newest = complete[-1]
    kept = set(complete[-keep:])
    for step in steps_in(directory):
        if step < newest and step not in kept:
            withdraw(directory, step)
            shutil.rmtree(step_dir(directory, step), ignore_errors=True)


def _sizes_match(place: Path, manifest: Manifest) -> bool:
    for rank, payload_bytes in enumerate(manifest.payload_bytes):
        try:
            size = (place / f"rank-{rank}.shard").stat().st_size
        except OSError:
            return False
        if size != PAGE + payload_bytes:
            return False
    return len(manifest.payload_bytes) == manifest.world_size


def _header_on_disk(path: Path, expected: Expected) -> Header:
    try:
        header = header_of(path)
    except FileNotFoundError as error:
        raise ShardMissing(f"{path} is missing: step {expected.step} is not complete") from error
    if header is None:
        raise ShardBad(f"{path} is truncated or no shard")
    shards.check_header(header, expected, str(path))
    return header


def header_of(path: Path) -> Header | None:
    """Of a whole file; None for any other. Raises OSError."""
    with path.open("rb") as file:
        header = shards.read_header(memoryview(file.read(PAGE)))
        size = os.fstat(file.fileno()).st_size
    return header if header is not None and size == PAGE + header.payload_bytes else None


# --- the rank's side -----------------------------------------------------------------------------


def read(directory: Path, expected: Expected) -> Shard:
    """Open the rank's shard of a published step. Raises ShardMissing or ShardBad."""
    manifest_of(directory, expected.step)
    shard = open_file(directory, expected)
    return slices.whole(shard, partial(open_file, directory))


def open_file(directory: Path, expected: Expected) -> Shard:
    """What the rank wrote, published or not. Raises ShardMissing or ShardBad."""
    path = shard_path(directory, expected.step, expected.rank)
    try:
        mapping = slots.map_private(path)
    except OSError as error:
        raise ShardMissing(f"{path} cannot be read: {error.strerror}") from error
    return shards.open_shard(mapping, expected, str(path))


# --- files ---------------------------------------------------------------------------------------


def steps_in(directory: Path) -> list[Step]:
    """Those that have a directory, oldest first."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(Step(int(match[1])) for name in names if (match := _STEP.fullmatch(name)))


def _read_manifest(place: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((place / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_dir(path.parent)


def _make_dir(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        _sync_dir(path.parent)


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
