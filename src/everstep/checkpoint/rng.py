"""Random number states of this process: part of every shard, so that a restart draws the same.

capture.py stores them under RNG_ENTRY beside the user's entries, load.py sets them last. Python's,
numpy's if the script imported it, torch's for the CPU and for every CUDA device.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

RNG_ENTRY = "everstep.rng"


def rng_states() -> dict[str, Any]:
    """All generators of this process that a script can use without creating one itself."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Continue where rng_states() was. CUDA states are set when CUDA starts, if it has not yet."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
