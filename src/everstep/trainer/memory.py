"""Saving: joins the state's snapshot, the guard on the optimizers and the copy thread.

checkpoint.py calls it on the training thread, behind a Feature. It decides nothing about steps and
slots (checkpoint/slots.py) and nothing about what is copied when (checkpoint/capture.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from everstep.checkpoint.budget import locked_limit
from everstep.checkpoint.capture import CannotSave, Capture, Snapshot, Stateful
from everstep.checkpoint.copier import Copier, CpuTransfer, Job, Transfer
from everstep.checkpoint.guard import Guard
from everstep.checkpoint.need import Need
from everstep.checkpoint.slots import ShardWriter, SharedMemoryTooSmall, Writer
from everstep.model import NO_STEP, Step
from everstep.trainer.feature import Feature
from everstep.trainer.notices import NoticeKind, Notices
from everstep.trainer.place import Place


class Memory:
    """The every-step checkpoint of one rank. It is the copier's Outcome, too."""

    def __init__(
        self,
        place: Place,
        state: Mapping[str, Stateful],
        notices: Notices,
        *,
        explicit_wait: bool,
    ) -> None:
        check_entries(state)
        self._place = place
        self._notices = notices
        self._guard = Guard(state, explicit_wait=explicit_wait)
        self._capture = Capture(state, self._guard)
        self._copier = Copier(self._open_writer, self)
        self._transfer: Transfer | None = None
        self._feature: Feature | None = None
        self._last = NO_STEP
        if self._guard.guards_nothing:
            notices.tell(
                NoticeKind.ADVICE,
                "checkpoint() was given a model without its optimizer: each save copies all "
                "parameters at once. Give the optimizer too, and it takes no time",
            )

    @property
    def saved_step(self) -> Step:
        return self._copier.saved

    def start(self, wait: Callable[[], None], feature: Feature) -> None:
        """Hook the optimizers to `wait`, and start the copy thread; its death ends `feature`."""
        self._feature = feature
        self._guard.install(wait)
        self._copier.start()
        if self._place.context.restore == NO_STEP:
            self._copier.prefault()

    def restored(self, step: Step) -> None:
        """The script continues after this step; it is complete in memory, or NO_STEP is."""
        self._copier.prefault()
        self._copier.saved = step
        self._last = self._place.context.restore

    def save(self, step: Step) -> None:
        if step <= self._last:
            raise CannotSave(f"save({step}) came after save({self._last}): steps must grow")
        self._copier.settle()
        snapshot = self._capture.snapshot(step)
        if self._transfer is None:
            self._transfer = _transfer_for(snapshot)
        self._copier.submit(Job(snapshot, self._transfer))
        self._last = step

    def hold(self) -> None:
        self._copier.hold()

    def flush(self, timeout_s: float) -> None:
        self._copier.settle()
        self._copier.flush(timeout_s)

    def forget(self) -> None:
        self._copier.forget()

    def stop(self) -> None:
        """End the copy thread. A rank just exits; benchmarks and tests make many."""
        self._copier.stop()

    # --- what became of saves: on either thread --------------------------------------------------

    def refused(self, step: Step, error: SharedMemoryTooSmall) -> None:
        self._notices.tell(
            NoticeKind.SAVE_REFUSED, f"step {step} is not kept, the state has grown: {error}", step
        )

    def reserved(self, need: Need) -> None:
        """Said where people look: in the first rank's output, else in the agents' logs."""
        context = self._place.context
        text = f"checkpoints in memory take {need} in {Path(context.shm).parent}"
        if self._transfer is not None and self._transfer.pins:
            text += need.unpinned(locked_limit())
        if context.rank == 0:
            self._notices.tell(NoticeKind.MEMORY, text)
        elif context.local_rank == 0:
            self._notices.send(NoticeKind.MEMORY, text)

    def torn(self, step: Step, entry: str) -> None:
        self._notices.tell(
            NoticeKind.SAVE_TORN,
            f"step {step} is not kept: a tensor of {entry!r} was changed between save() and the "
            "step of the optimizer that checkpoint() knows. Call ckpt.wait() before whatever "
            "changes it (a second optimizer, clipping of weights, an average)",
            step,
        )

    def failed(self, step: Step, error: Exception) -> None:
        assert self._feature is not None
        self._feature.switch_off(error, step)

    def _open_writer(self) -> ShardWriter:
        context = self._place.context
        return ShardWriter(
            Path(context.shm),
            Writer(
                rank=context.rank,
                world_size=context.world_size,
                generation=context.generation,
                local_ranks=self._place.local_ranks,
                backups=context.backups,
            ),
        )


def check_entries(state: Mapping[str, Stateful]) -> None:
    """Raises CannotSave for what cannot be saved and loaded at all."""
    for name, item in state.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise CannotSave(
                    f"checkpoint() was given {name!r}, a {type(item).__name__} without "
                    f"{method}(): give it objects with state_dict() and load_state_dict()"
                )


def _transfer_for(snapshot: Snapshot) -> Transfer:
    if not any(source.is_cuda for source in snapshot.sources):
        return CpuTransfer()
    from everstep.checkpoint.cuda import CudaTransfer  # noqa: PLC0415 -- needs a device

    return CudaTransfer()
