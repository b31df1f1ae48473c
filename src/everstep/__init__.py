"""everstep keeps multi-machine PyTorch training running.

This is what a training script imports; it needs msgspec alone and imports torch only when a
checkpoint is made. Everything else of everstep is reached by the `everstep` command.
"""

from __future__ import annotations

from everstep.trainer.attach import attach

__all__ = ["__version__", "attach"]
__version__ = "0.1.0"
