"""Restoring: find a good copy of the step that everstep named, and load it.

checkpoint.py calls it once, before training. Memory first, then the machine's own disk, then what
was published for all machines; a copy that fails a check is dropped, so that the next restart is
not sent to it again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from everstep.checkpoint import local_disk, slots
from everstep.checkpoint.capture import Stateful
from everstep.checkpoint.digest import check_digest
from everstep.checkpoint.disk import step_dir
from everstep.checkpoint.format import Expected, Shard, ShardBad
from everstep.checkpoint.load import DoesNotFit, Loader
from everstep.checkpoint.slots import ShardLost, ShardMissing
from everstep.checkpoint.threads import usable_threads
from everstep.checkpoint.tier import FILE, TierFailed, tier_at
from everstep.model import NO_STEP, EverstepError, Rank, Step, Value
from everstep.trainer.checkpoint import CheckpointDoesNotFit, CheckpointUnusable
from everstep.trainer.context import AttachContext
from everstep.trainer.notices import NoticeKind, Notices

if TYPE_CHECKING:
    from everstep.checkpoint.start import Started

_Open = Callable[[AttachContext, Expected], Shard]
_Drop = Callable[[AttachContext, Rank], None]


EXPORT_LOOK_S = 0.1
"""Pause between two looks for what rank 0 makes: it takes seconds to minutes."""


class Restored(Value, frozen=True, kw_only=True):
    """What restore_state() did."""

    in_memory: Step
    """The restored step if its copy lies in this machine's memory, else NO_STEP."""
    set_rng: Callable[[], None]
    """Sets the random number states once more."""


def restore_state(
    context: AttachContext, state: Mapping[str, Stateful], notices: Notices
) -> Restored:
    """Load the step that `context` names into `state`. Raises CheckpointUnusable."""
    if context.restore_world and context.restore_rank is None:
        return _restore_parts(context, state, notices)
    began_s = time.monotonic()
    saver = context.rank if context.restore_rank is None else context.restore_rank
    expected = Expected(
        step=context.restore,
        rank=saver,
        generation=context.restore_generation,
        world_size=context.restore_world or context.world_size,
    )
    threads = usable_threads()
    reasons = []
    for name, open_copy, drop in _places(context):
        try:
            shard = open_copy(context, expected)
            check_digest(shard, threads)
            loader = Loader(shard, threads, regrown=bool(context.restore_world))
            loader.load(state)
        except (ShardMissing, ShardLost, TierFailed) as error:
            reasons.append(str(error))
        except ShardBad as error:
            reasons.append(str(error))
            drop(context, saver)
            notices.tell(
                NoticeKind.COPY_BAD, f"a copy in {name} was dropped: {error}", expected.step
            )
        except DoesNotFit as error:
            raise CheckpointDoesNotFit(str(error)) from error
        else:
            took_s = time.monotonic() - began_s
            text = f"restored step {expected.step} from {name} in {took_s:.3f} s"
            notices.send(NoticeKind.RESTORED, text, expected.step)
            own = name == "memory" and not context.restore_world
            in_memory = expected.step if own else NO_STEP
            return Restored(in_memory=in_memory, set_rng=loader.rng_setter())
    raise _unusable(context, reasons)


def _places(context: AttachContext) -> list[tuple[str, _Open, _Drop]]:
    """Where a copy may be, the nearest first; how it is opened and how it is dropped."""
    memory = ("memory", _from_memory, _drop_from_memory)
    own_disk = ("the machine's own disk", _from_local_disk, _drop_from_local_disk)
    disk = ("disk", _from_disk, _drop_from_disk)
    return [memory, own_disk, disk] if context.local_disk else [memory, disk]


def start_state(directory: str, state: Mapping[str, Stateful], notices: Notices) -> Started:
    """Load a DCP directory into `state`. Raises CheckpointUnusable."""
    from everstep.checkpoint.start import start_from  # noqa: PLC0415 -- DCP takes long to import

    began_s = time.monotonic()
    running = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    try:
        started = start_from(directory, state, Rank(rank), world_size)
    except DoesNotFit as error:
        raise CheckpointUnusable(str(error)) from error
    took_s = time.monotonic() - began_s
    where = "" if started.step == NO_STEP else f" after step {started.step}"
    notices.send(NoticeKind.RESTORED, f"started from {directory}{where} in {took_s:.3f} s")
    if started.left_out and rank == 0:
        left_out = "; ".join(started.left_out)
        notices.tell(
            NoticeKind.ADVICE,
            f"{directory} does not hold all of the state, the rest starts afresh: {left_out}",
        )
    return started


def _restore_parts(
    context: AttachContext, state: Mapping[str, Stateful], notices: Notices
) -> Restored:
    """Of a published step that another number of ranks wrote: what is this rank's now."""
    began_s = time.monotonic()
    try:
        directory = _exported(context)
        from everstep.checkpoint.start import start_from  # noqa: PLC0415 -- DCP imports slowly

        started = start_from(str(directory), state, context.rank, context.world_size)
    except DoesNotFit as error:
        raise CheckpointDoesNotFit(str(error)) from error
    except (EverstepError, OSError) as error:
        raise _unusable(context, [str(error)]) from error
    took_s = time.monotonic() - began_s
    text = (
        f"restored step {context.restore} of {context.restore_world} ranks by way of torch's own"
        f" format in {took_s:.3f} s"
    )
    notices.send(NoticeKind.RESTORED, text, context.restore)
    if started.left_out and context.rank == 0:
        left_out = "; ".join(started.left_out)
        notices.tell(NoticeKind.ADVICE, f"the rest of the state starts afresh: {left_out}")
    return Restored(in_memory=NO_STEP, set_rng=started.set_rng)


def _exported(context: AttachContext) -> Path:
    """The step in torch's own format, beside its shards. Rank 0 makes it, all others wait for it:
    should rank 0 fail, all of them are started again.
    """
    place = step_dir(Path(context.checkpoint_dir.removeprefix(FILE)), context.restore)
    directory = place / f"dcp-{context.restore_generation}"
    if context.rank == 0 and not directory.exists():
        from everstep.checkpoint.export import export  # noqa: PLC0415 -- see above

        beside = place / f"dcp-{context.restore_generation}-by-{context.generation}"
        shutil.rmtree(beside, ignore_errors=True)
        export(tier_at(context.checkpoint_dir), context.restore, beside)
        beside.rename(directory)
    while not directory.exists():
        time.sleep(EXPORT_LOOK_S)
    return directory


def _unusable(context: AttachContext, reasons: list[str]) -> EverstepError:
    return CheckpointUnusable(
        f"rank {context.rank} cannot restore step {context.restore} of generation "
        f"{context.restore_generation}: {'; '.join(reasons)}. The bad copies are dropped, "
        "so a restart gets an older step"
    )


def _from_memory(context: AttachContext, expected: Expected) -> Shard:
    return slots.find(Path(context.shm), expected)


def _from_local_disk(context: AttachContext, expected: Expected) -> Shard:
    return local_disk.read(Path(context.local_disk), expected)


def _drop_from_local_disk(context: AttachContext, saver: Rank) -> None:
    with contextlib.suppress(OSError):  # a disk that fails altogether
        local_disk.drop(Path(context.local_disk), saver, context.restore)


def _from_disk(context: AttachContext, expected: Expected) -> Shard:
    return tier_at(context.checkpoint_dir).read(expected)


def _drop_from_memory(context: AttachContext, saver: Rank) -> None:
    slots.drop_step(Path(context.shm), saver, context.restore)


def _drop_from_disk(context: AttachContext, saver: Rank) -> None:
    del saver
    tier_at(context.checkpoint_dir).withdraw(context.restore)
