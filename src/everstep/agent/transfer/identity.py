"""Who an agent is towards other agents."""

from __future__ import annotations

from typing import NamedTuple

from everstep.model import MachineId


class Identity(NamedTuple):
    """What an agent proves to others, and demands of them."""

    token: bytes
    """Of the job: who has it belongs to us."""
    uid: str
    """Of the job's submission."""
    machine: MachineId
