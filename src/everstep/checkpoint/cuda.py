"""Copies from CUDA devices: a side stream into slots that the driver has pinned.

The host never waits for a copy before the optimizer step: the training stream waits for the copy's
event instead. copier.py calls this for states that hold CUDA tensors. Not tried on a GPU yet: no
machine of ours has one (docs/checkpoints.md says so too).
"""

from __future__ import annotations

import torch

from everstep.checkpoint.copier import Job
from everstep.checkpoint.slots import OpenSlot


class CudaTransfer:
    """One side stream on the device that is current when training first saves."""

    pins = True

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)
        self._ready = torch.cuda.Event()
        self._copied = torch.cuda.Event()
        self._pinned: dict[int, tuple[int, OpenSlot]] = {}

    def mark(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._device))

    def copy(self, job: Job, slot: OpenSlot, targets: list[torch.Tensor]) -> None:
        with torch.cuda.device(self._device):
            self._pin(slot)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                torch._foreach_copy_(targets, job.snapshot.sources, non_blocking=True)
                self._copied.record(self._stream)
        job.queued.set()
        self._copied.synchronize()

    def hold(self, job: Job) -> None:
        job.queued.wait()
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _pin(self, slot: OpenSlot) -> None:
        """Register the slot's memory once per mapping. Refused (limits): copies are just slower.

        The old slot is kept until then, because memory must not be unmapped while registered.
        """
        cudart = torch.cuda.cudart()
        address, old = self._pinned.get(slot.index, (0, None))
        if old is not None and old.mappings == slot.mappings:
            return
        if address:
            cudart.cudaHostUnregister(address)
        address = torch.frombuffer(slot.whole, dtype=torch.uint8).data_ptr()
        refused = int(cudart.cudaHostRegister(address, len(slot.whole), 0))
        self._pinned[slot.index] = (0 if refused else address, slot)
