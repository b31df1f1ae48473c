"""everstep.attach(): from the environment that the agent set to a Run. Once per process.

The variable is taken out of the environment, so that programs which the script starts are not taken
for the rank. Data loader workers and other children of multiprocessing get a Run with nothing
behind it, and so does everything outside everstep.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep.model import NO_GENERATION, Rank
from everstep.trainer import dumping, traced
from everstep.trainer.context import VARIABLE, AttachContext
from everstep.trainer.notices import Notices
from everstep.trainer.place import Place
from everstep.trainer.run import FLUSH_S, Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_runs: dict[int, Run] = {}
"""The Run of this process, by its pid: a forked child is another process."""


def attach(*, peak_flops: float | None = None, mesh: DeviceMesh | None = None) -> Run:
    """Join the run that everstep started this process for; outside everstep, do nothing.

    `peak_flops` is one device's peak in FLOP/s for the number format in use; Run.mfu needs it.
    `mesh` is the device mesh of all ranks: its dimensions tell where backups must not lie together.
    Called again, it returns the same Run, and takes the mesh if it is given one.
    """
    run = _runs.get(os.getpid())
    if run is None:
        run = _runs[os.getpid()] = _make_run(_place(), peak_flops)
    if mesh is not None:
        run.mesh = mesh
    return run


def _make_run(place: Place | None, peak_flops: float | None) -> Run:
    if place is None:
        return Run(None, Notices(None, Rank(-1), NO_GENERATION), peak_flops)
    context = place.context
    address = Path(context.notice_socket) if context.notice_socket else None
    run = Run(place, Notices(address, context.rank, context.generation), peak_flops)
    os.register_at_fork(after_in_child=run.forget)
    traced.let_be_traced()
    with contextlib.suppress(OSError):  # then only py-spy shows its stacks
        dumping.register(Path(context.shm), context.local_rank)
    atexit.register(partial(run.flush, FLUSH_S))
    return run


def _place() -> Place | None:
    if multiprocessing.parent_process() is not None:
        return None
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        context = msgspec.json.decode(text, type=AttachContext)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except (msgspec.MsgspecError, ValueError) as error:
        message = f"everstep: attach() is off: {VARIABLE} or LOCAL_WORLD_SIZE is malformed: {error}"
        print(message, file=sys.stderr)  # noqa: T201 -- for people
        return None
    return Place(context=context, local_ranks=local_ranks)
