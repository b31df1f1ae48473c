"""What stands around a rank in these tests: its place, its agent's socket, its copy threads."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from everstep.checkpoint import slots
from everstep.model import Copy, Generation, JobId, MachineId, Rank, Step, Term
from everstep.trainer.context import AttachContext
from everstep.trainer.heartbeat import Heartbeat, SlotReader
from everstep.trainer.notices import Notice, NoticeKind, Notices
from everstep.trainer.place import Place
from everstep.trainer.run import Run


class Surroundings:
    """Rank 0 of 1."""

    def __init__(self, shm: Path, tmp_path: Path) -> None:
        self.shm = shm
        self.disk = tmp_path / "checkpoints"
        self.local_disk: Path | None = None
        self.notice_path = tmp_path / "notice.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self.notice_path))
        self._runs: list[Run] = []

    def context(self, generation: int = 1, restore: int = -1, made_by: int = 1) -> AttachContext:
        return AttachContext(
            job=JobId("job"),
            machine=MachineId("m0"),
            term=Term(1),
            generation=Generation(generation),
            rank=Rank(0),
            local_rank=0,
            world_size=1,
            shm=str(self.shm),
            notice_socket=str(self.notice_path),
            restore=Step(restore),
            restore_generation=Generation(made_by),
            checkpoint_dir=str(self.disk),
            local_disk=str(self.local_disk or ""),
        )

    def run(
        self,
        generation: int = 1,
        restore: int = -1,
        made_by: int | None = None,
        peak_flops: float | None = None,
    ) -> Run:
        """A rank of this generation, told to restore this step, made by the generation before."""
        context = self.context(generation, restore, made_by or max(1, generation - 1))
        notices = Notices(self.notice_path, context.rank, context.generation)
        run = Run(Place(context=context, local_ranks=1), notices, peak_flops)
        self._runs.append(run)
        return run

    def beat(self) -> Heartbeat:
        """What the agent reads in the heartbeat slot."""
        reader = SlotReader(self.shm / "heartbeat", 1)
        (beat,) = reader.read()
        reader.close()
        assert beat is not None
        return beat

    def notices(self) -> list[Notice]:
        """What the agent has received since the last call, without what every run says."""
        found: list[Notice] = []
        while True:
            try:
                datagram = self._socket.recv(1 << 16)
            except BlockingIOError:
                return found
            notice = msgspec.msgpack.decode(datagram, type=Notice)
            if notice.kind != NoticeKind.MEMORY:
                found.append(notice)

    def kinds(self) -> list[NoticeKind]:
        return [notice.kind for notice in self.notices()]

    def copies(self) -> list[Copy]:
        return slots.inventory(self.shm, [Rank(0)])

    def steps_in_memory(self) -> list[int]:
        return [copy.step for copy in self.copies()]

    def close(self) -> None:
        """End all copy threads: none may live on into the next test."""
        for run in self._runs:
            run.stop()
        self._socket.close()
