"""What keeps tensors still while the copy thread reads them.

Parameters and optimizer state may be copied in the background because only the optimizer changes
them, and it asks first: torch.optim's pre-step hook waits for the copy. An optimizer of another
make has no such hook; then the script must call ckpt.wait() itself, and say so. Everything that no
hooked optimizer owns (buffers, EMA weights, frozen parameters) is copied at once instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.capture import CannotSave, Stateful
from everstep.checkpoint.layout import local_of, tensors_in


class Guard:
    """The hooks on all optimizers of one checkpoint, and what they protect."""

    def __init__(self, state: Mapping[str, Stateful], *, explicit_wait: bool) -> None:
        self._explicit = explicit_wait
        self._modules = [item for item in state.values() if isinstance(item, torch.nn.Module)]
        self._optimizers: list[torch.optim.Optimizer] = []
        self.owners: set[str] = set()
        """Entries of which every tensor is guarded by ckpt.wait()."""
        for name, item in state.items():
            optimizer = hookable(item)
            if optimizer is not None:
                self._optimizers.append(optimizer)
            elif is_optimizer(item):
                self._need_explicit(name, item)

    @property
    def guards_nothing(self) -> bool:
        """True: every save copies the whole model at once, for want of an optimizer."""
        return bool(self._modules) and not (self._optimizers or self._explicit)

    def install(self, wait: Callable[[], None]) -> None:
        """Have each optimizer call `wait` before it changes anything."""

        def before_step(*_: Any) -> None:
            wait()

        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(before_step)

    def pointers(self) -> set[int]:
        """Addresses of the tensors that change only after `wait`. Optimizer state comes and goes,
        so this is asked at every save.
        """
        with torch.no_grad():
            return {local_of(tensor).data_ptr() for tensor in self._tensors()}

    def _tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from tensors_in(group["params"])
            for values in optimizer.state.values():
                yield from tensors_in(values)
        if self._explicit:
            for module in self._modules:
                yield from module.parameters()

    def _need_explicit(self, name: str, item: Stateful) -> None:
        if not self._explicit:
            raise CannotSave(
                f"{name!r} is a {type(item).__name__}, which has no torch.optim step hook, so "
                "nothing would keep it from changing tensors while they are copied: call "
                "ckpt.wait() before each of its steps, and pass explicit_wait=True to checkpoint()"
            )
        self.owners.add(name)


def hookable(item: object) -> torch.optim.Optimizer | None:
    """The torch optimizer that this is, or that it wraps as `.optimizer`; None if there is none."""
    for candidate in (item, getattr(item, "optimizer", None)):
        # A wrapper that only inherits the type never ran its constructor: it has no hooks.
        hooks = hasattr(candidate, "_optimizer_step_pre_hooks")
        if hooks and isinstance(candidate, torch.optim.Optimizer) and is_optimizer(item):
            return candidate
    return None


def is_optimizer(item: object) -> bool:
    """Whether this steps parameters. Schedulers and gradient scalers have no zero_grad()."""
    if isinstance(item, torch.nn.Module):
        return False
    return callable(getattr(item, "step", None)) and callable(getattr(item, "zero_grad", None))
