"""The ways to save that bench/checkpoint.py compares, each as its makers advise. Runs in the ranks.

Rivals save what everstep saves, to memory or to a directory in memory, so that no disk slows them.
One that is asynchronous waits for its copy before the optimizer's step, or it would save a mixture
of two steps, and for its predecessor before the next save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from orders import LEFTOVERS
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from everstep.trainer.checkpoint import Checkpoint
from everstep.trainer.run import Run


class State:
    """What is saved: the same for all."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
    ) -> None:
        """`directory`: in memory, for whoever writes files."""
        self.model = model
        self.optimizer = optimizer
        self.directory = directory

    def tensors(self) -> list[torch.Tensor]:
        """All of them, without gradients."""
        found = [each.detach() for each in self.model.state_dict().values()]
        for values in self.optimizer.state.values():
            found += [each for each in values.values() if isinstance(each, torch.Tensor)]
        return found

    def nested(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def by_rank(self) -> dict[str, Any]:
        """Under names of this rank: DCP takes equal names for replicas and writes one of them."""
        rank = dist.get_rank()
        return {f"rank-{rank}.{n}": tensor for n, tensor in enumerate(self.tensors())}


class Saver(Protocol):
    """One way to save."""

    queued_s: float
    """What the last save() waited for its predecessor."""

    def begin(self) -> int:
        """The number of the step that begins."""

    def before_optimizer(self) -> None:
        """From here on the state changes."""

    def save(self, step: int) -> None: ...

    def settle(self) -> None:
        """At the end of a turn: wait for all that goes on in the background."""


class Nothing:
    """No checkpoint; and what the others have in common."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self._step = 0

    def begin(self) -> int:
        self._step += 1
        return self._step

    def before_optimizer(self) -> None: ...

    def save(self, step: int) -> None: ...

    def settle(self) -> None: ...


class EveryStep(Nothing):
    """everstep. Its own hook waits before the optimizer."""

    def __init__(self, run: Run, ckpt: Checkpoint, numbers: Iterator[int]) -> None:
        super().__init__()
        self._run = run
        self._ckpt = ckpt
        self._numbers = numbers

    def begin(self) -> int:
        return next(self._numbers)

    def save(self, step: int) -> None:
        self._ckpt.save(step)

    def settle(self) -> None:
        self._run.flush(60.0)


class Dcp(Nothing):
    """torch's distributed checkpoint, in the foreground."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._group = dist.new_group(backend="gloo")  # the background may not share the training's
        self._directory = state.directory / "dcp"  # all variants overwrite one: memory is short

    def save(self, step: int) -> None:  # noqa: ARG002
        state = self._state.by_rank()
        save(state, checkpoint_id=self._directory, process_group=self._group)

    def load_s(self) -> float:
        """Load the last one into the live tensors; the seconds it takes."""
        dist.barrier()
        begun = time.monotonic()
        state = self._state.by_rank()
        load(state, checkpoint_id=self._directory, process_group=self._group)
        return time.monotonic() - begun


class DcpAsync(Dcp):
    """Its async_save with the default stager, which copies in the foreground."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._upload: Future[Any] | None = None

    def save(self, step: int) -> None:  # noqa: ARG002
        begun = time.monotonic()
        self.settle()
        self.queued_s = time.monotonic() - begun
        self._upload = self._start()

    def settle(self) -> None:
        if self._upload is not None:
            self._upload.result()
            self._upload = None

    def _start(self) -> Future[Any]:
        started = async_save(
            self._state.by_rank(), checkpoint_id=self._directory, process_group=self._group
        )
        assert isinstance(started, Future)
        return started


class DcpStaged(DcpAsync):
    """Its async_save with a stager that copies in the background, into memory that it keeps."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._staging: Future[None] | None = None

    def before_optimizer(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def _start(self) -> Future[Any]:
        started = async_save(
            self._state.by_rank(),
            checkpoint_id=self._directory,
            process_group=self._group,
            async_stager=self._stager,
        )
        assert not isinstance(started, Future)
        self._staging = started.staging_completion
        return started.upload_completion


class DlroverFlash(Nothing):
    """DLRover's flash checkpoint: each rank copies its state into shared memory."""

    def __init__(self, state: State) -> None:
        super().__init__()
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # noqa: PLC0415
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # noqa: PLC0415

        ranks = dist.get_world_size()
        self._leave_note(state.directory)
        self._state = state
        self._to = StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(
            str(state.directory / "dlrover"), local_shard_num=ranks, global_shard_num=ranks
        )

    @staticmethod
    def _leave_note(directory: Path) -> None:
        """It leaves segments and sockets behind under this name: whoever ends the job wants it."""
        (directory / LEFTOVERS).write_text(os.environ["TORCHELASTIC_RUN_ID"])

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, self._state.nested(), storage_type=self._to)


class LmResiliency(Nothing):
    """lm-resiliency's save of tensors, its quickest, with its copy to the other rank."""

    def __init__(self, state: State) -> None:
        super().__init__()
        from lm_resiliency.checkpointing import (  # noqa: PLC0415 -- only who runs it has it
            InMemoryCheckpointManager,
            InMemoryCkptConfig,
        )

        self._state = state
        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(
                replication_jump=1, disk_flush_interval=0, disk_folder=str(state.directory / "lm")
            )
        )

    def before_optimizer(self) -> None:
        self._manager.maybe_wait()

    def save(self, step: int) -> None:
        begun = time.monotonic()
        self.settle()
        self.queued_s = time.monotonic() - begun
        self._manager.save_tensors(self._state.tensors(), step)

    def settle(self) -> None:
        self._manager.finalize_replication()


RIVALS: dict[str, type[Dcp | DlroverFlash | LmResiliency]] = {
    "dcp": Dcp,
    "dcp_async": DcpAsync,
    "dcp_staged": DcpStaged,
    "dlrover": DlroverFlash,
    "lm_resiliency": LmResiliency,
}
