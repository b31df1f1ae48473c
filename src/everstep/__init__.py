"""everstep keeps multi-machine PyTorch training running.

This is what a training script imports; it needs msgspec alone and imports torch only when a
checkpoint is made. Everything else of everstep is reached by the `everstep` command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.trainer.attach import attach

__all__ = ["__version__", "attach"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `attach` at its first use: a keeper imports this package too, and little else."""
    if name == "attach":
        from everstep.trainer.attach import attach  # noqa: PLC0415 -- see above

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
