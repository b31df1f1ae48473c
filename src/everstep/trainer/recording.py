"""Has torch give this rank's flight record to the agent: how far its collectives have come.

torch's own worker server does it, on a Unix socket in the machine's shared memory, in threads that
need no interpreter: it answers while another thread holds Python's lock. Beside it a small file
says which ranks are in which group, since gloo leaves that out of its record. run.py calls `serve`;
agent/tracing/recorder.py asks.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from everstep.looks import Ranges, ranges_of
from everstep.model import EverstepError, Generation, Value
from everstep.trainer.context import AttachContext
from everstep.trainer.spare_threads import spare_threads

GROUPS_MAX = 64
"""Groups of one rank that are told of."""
RANGES_MAX = 128
"""Of one group. A larger one is known to the controller by the job's layout, if at all."""
ERRORS = 2
"""Of what the C++ part of torch logs, the level above warnings."""
THREADS_LEAST = 9
"""Of torch's server: eight that answer, or as many as there are processors but one, and another."""
ROOMY = 2
"""So many times what the servers need has to be free: training starts threads as well."""
_serving: list[int] = []
"""The pid whose server runs."""


class NoRoom(EverstepError):
    """Too few threads may be started here."""


class NamedGroup(Value, frozen=True, kw_only=True):
    """A process group as torch names it in its records."""

    name: str
    members: Ranges


class Recorder(Value, frozen=True, kw_only=True):
    """Content of the file."""

    generation: Generation
    pid: int
    groups: tuple[NamedGroup, ...]


def file_of(shm: Path, local_rank: int) -> Path:
    return shm / f"recorder-{local_rank}"


def socket_of(shm: Path, local_rank: int) -> str:
    """Its name in that directory, whose path may be too long for a socket."""
    return f"{file_of(shm, local_rank).name}.sock"


def serve(context: AttachContext) -> None:
    """Start the server, once, and say what groups there are now; nothing while there are none.

    NoRoom, RuntimeError or OSError say why torch or the file system would not have it.
    """
    torch, c10d = sys.modules.get("torch"), sys.modules.get("torch.distributed.distributed_c10d")
    if torch is None or c10d is None or not c10d.is_initialized():
        return
    shm, pid = Path(context.shm), os.getpid()
    server = getattr(torch._C._distributed_c10d, "_WorkerServer", None)  # noqa: SLF001 -- its name
    if server is None:
        return
    if pid not in _serving:
        _refuse_without_room()
        _serving[:] = [pid]
        _start(torch, server, shm, context.local_rank)
    told = Recorder(generation=context.generation, pid=pid, groups=_groups(c10d))
    path = file_of(shm, context.local_rank)
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(msgspec.json.encode(told))
    beside.replace(path)


def _refuse_without_room() -> None:
    """Raises NoRoom rather than have torch end the process for want of a thread.

    Its server starts as many as there are processors, and those of other ranks do so now, too.
    """
    each = max(THREADS_LEAST, os.cpu_count() or 1)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    wanted, spare = each * (int(ranks) if ranks.isdecimal() else 1), spare_threads()
    if spare is not None and spare < ROOMY * wanted:
        raise NoRoom(
            f"torch's server would have {each} threads in each rank here, and the limits (pids.max"
            f" of control groups, ulimit -u) leave room for {max(spare, 0)} in all: raise them"
        )


def _start(torch: Any, server: Any, shm: Path, local_rank: int) -> None:
    """It is never taken apart: its end in a forked child would close the listening socket of its
    parent, whose server then ends the process. So one reference too many is kept.
    """
    directory = os.open(shm, os.O_PATH | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{directory}/{socket_of(shm, local_rank)}"
        Path(path).unlink(missing_ok=True)
        with _Quiet(torch):
            started = server(path)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(started))
    finally:
        os.close(directory)


class _Quiet:
    """Has torch not tell people that its server listens.

    Standard error is not touched: other threads write to it, and start programs that keep it.
    """

    def __init__(self, torch: Any) -> None:
        self._level: ctypes.c_int | None = None
        with suppress(OSError, ValueError):  # another build: the line is shown
            library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
            self._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        self._before = 0

    def __enter__(self) -> None:
        if self._level is not None:
            self._before = self._level.value
            self._level.value = max(self._before, ERRORS)

    def __exit__(self, *_: object) -> None:
        if self._level is not None:
            self._level.value = self._before


def _groups(c10d: Any) -> tuple[NamedGroup, ...]:
    found = []
    world = c10d._world  # noqa: SLF001 -- no other way
    for group, members in list(world.pg_group_ranks.items())[:GROUPS_MAX]:
        ranges = ranges_of(members)
        if len(ranges) <= RANGES_MAX:
            found.append(NamedGroup(name=str(world.pg_names.get(group, "")), members=ranges))
    return tuple(found)
