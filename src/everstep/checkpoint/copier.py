"""The copy thread: from a snapshot to a committed slot while training goes on.

One thread per rank, and the only writer of the rank's slots. For each save, in this order: choose
and void a slot, copy, check that nothing watched has changed, make the digest of the copy, commit;
only then may the optimizer step. So whatever counts as a copy has its digest.

All bulk work (copying, summing, faulting pages in) runs without the GIL, each in one call for the
whole save, because a thread that needs the GIL between thousands of small copies waits up to 5 ms
for each of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from everstep.checkpoint.capture import Snapshot, views_of
from everstep.checkpoint.digest import digest_of
from everstep.checkpoint.format import TensorEntry
from everstep.checkpoint.need import Need
from everstep.checkpoint.slots import OpenSlot, ShardWriter, SharedMemoryTooSmall
from everstep.model import NO_STEP, Step

PREFAULT_BYTES = 64 << 20
"""Piece in which slots are faulted in while there is nothing to copy: some 50 ms each."""


class Transfer(Protocol):
    """How bytes get from the tensors into the slot: for the CPU here, for CUDA in cuda.py."""

    pins: bool
    """Whether it pins the slots that it copies to."""

    def mark(self) -> None:
        """On the training thread: in stream order, the tensors now have what is to be saved."""

    def copy(self, job: Job, slot: OpenSlot, targets: list[torch.Tensor]) -> None:
        """On the copy thread: returns when all bytes are in the slot."""

    def hold(self, job: Job) -> None:
        """On the training thread: what it queues from here on runs after the copy."""


class Outcome(Protocol):
    """Who is told what became of saves. Called on either thread; must not block."""

    def reserved(self, need: Need) -> None:
        """Room for all slots is there."""

    def refused(self, step: Step, error: SharedMemoryTooSmall) -> None:
        """Only this save; the next may succeed."""

    def torn(self, step: Step, entry: str) -> None:
        """Something changed a tensor of this entry before it was copied."""

    def failed(self, step: Step, error: Exception) -> None:
        """The copy thread has ended; nothing more will be saved."""


class Job:
    """One save on its way."""

    def __init__(self, snapshot: Snapshot, transfer: Transfer) -> None:
        self.snapshot = snapshot
        self.transfer = transfer
        self.slot: OpenSlot | None = None
        """Set when it is committed."""
        self.saved_before = NO_STEP
        self.torn_entry: str | None = None
        self.held = False
        """Whether the training thread has let it pass, as it must before the optimizer step."""
        self.queued = threading.Event()
        """Set when later work may be ordered behind the copy on the device."""
        self.done = threading.Event()
        """Set when it is committed or given up: the tensors are not read any more."""

    def finish(self) -> None:
        self.queued.set()
        self.done.set()


class _Prefault:
    """In the queue: nothing to save, but time to fault memory in."""


_PREFAULT = _Prefault()


class CpuTransfer:
    """Plain copies of memory."""

    pins = False

    def mark(self) -> None:
        """Nothing to do: what the training thread did is done."""

    def copy(self, job: Job, slot: OpenSlot, targets: list[torch.Tensor]) -> None:  # noqa: ARG002
        if targets:
            torch._foreach_copy_(targets, job.snapshot.sources)

    def hold(self, job: Job) -> None:
        job.done.wait()


class Copier:
    """The copy thread, and its front for the training thread."""

    def __init__(self, open_writer: Callable[[], ShardWriter], outcome: Outcome) -> None:
        self._open_writer = open_writer
        self._outcome = outcome
        self._queue: queue.SimpleQueue[Job | _Prefault | None] = queue.SimpleQueue()
        self._writer: ShardWriter | None = None
        self._job: Job | None = None
        self._targets = TargetCache()
        self._reserved = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="everstep-copy", daemon=True)
        self.saved = NO_STEP
        """Newest step that is committed."""

    def start(self) -> None:
        """Map what an earlier process of this rank left, then wait for work."""
        self._thread.start()

    def prefault(self) -> None:
        """Fault that in while nothing else is asked for. Not while a restore reads it: both would
        take longer.
        """
        self._queue.put(_PREFAULT)

    def submit(self, job: Job) -> None:
        """Start a save. The previous one must have been settled."""
        self._job = job
        job.saved_before = self.saved
        job.transfer.mark()
        self._queue.put(job)
        if self._ended:
            job.finish()

    def hold(self) -> None:
        """Before the optimizer step: from here on the saved tensors may change.

        Nothing may have changed them since the save. If something did, the copy is void.
        """
        job = self._job
        if job is None or job.held:
            return
        job.torn_entry = job.snapshot.watch.changed_entry()
        job.transfer.hold(job)
        job.held = True
        if job.torn_entry is not None:
            job.done.wait()
            self._take_back(job, job.torn_entry)

    def settle(self) -> None:
        """Before the next save: the previous one is committed or given up."""
        self.hold()
        if self._job is not None:
            self._job.done.wait()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest save is committed or given up. False: it takes longer."""
        return self._job is None or self._job.done.wait(timeout_s)

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def forget(self) -> None:
        """In a forked child there is no copy thread: nothing waits for it."""
        self._job = None

    def _take_back(self, job: Job, entry: str) -> None:
        """The training thread found the copy torn after the copy thread had committed it."""
        if job.slot is not None and self._writer is not None:
            self._writer.void(job.slot)
            self.saved = job.saved_before
            self._outcome.torn(job.snapshot.step, entry)

    # --- on the copy thread ----------------------------------------------------------------------

    def _run(self) -> None:
        job: Job | None = None
        try:
            self._writer = writer = self._open_writer()
            while True:
                work = self._queue.get()
                if work is None:
                    return
                if isinstance(work, Job):
                    job = work
                    self._save(job, writer)
                    job.finish()
                while self._queue.empty() and writer.prefault(PREFAULT_BYTES):
                    pass
        except Exception as error:  # noqa: BLE001 -- the thread's outermost loop
            self._outcome.failed(job.snapshot.step if job else NO_STEP, error)
        finally:
            self._end(job)

    def _save(self, job: Job, writer: ShardWriter) -> None:
        snapshot = job.snapshot
        if not self._reserved:
            need = writer.reserve(snapshot.payload_bytes, snapshot.backup_bytes(writer.rank))
            if need is not None:
                self._outcome.reserved(need)
            self._reserved = True
        try:
            slot = writer.begin(snapshot.step, snapshot.payload_bytes)
        except SharedMemoryTooSmall as error:
            self._outcome.refused(snapshot.step, error)
            return
        head = len(snapshot.head)
        slot.payload[:head] = snapshot.head
        job.transfer.copy(job, slot, self._targets.of(slot, head, snapshot.tensors))
        torn = job.torn_entry or snapshot.watch.changed_entry()
        if torn is not None:
            self._outcome.torn(snapshot.step, torn)
            return
        writer.commit(slot, digest_of(slot.payload))
        self.saved = snapshot.step
        job.slot = slot

    def _end(self, job: Job | None) -> None:
        """Nobody may wait for a thread that has ended; submit() sees to what comes after this."""
        self._ended = True
        if job is not None:
            job.finish()
        while not self._queue.empty():
            waiting = self._queue.get()
            if isinstance(waiting, Job):
                waiting.finish()


class TargetCache:
    """For each slot, the views that its last save was copied to: layouts hardly ever change."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[object, list[torch.Tensor]]] = {}

    def of(self, slot: OpenSlot, head: int, tensors: tuple[TensorEntry, ...]) -> list[torch.Tensor]:
        key = (slot.mappings, head, tensors)
        kept = self._kept.get(slot.index)
        if kept is None or kept[0] != key:
            kept = (key, views_of(slot.payload[head:], tensors))
            self._kept[slot.index] = kept
        return kept[1]
