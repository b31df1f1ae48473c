"""What a simulated agent answers when its machine is tested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.core.agent_io import DoTest
from everstep.events import MachineTested

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

UNTOLD = 0.1
"""Share of tests that could not be done."""


def tested(machine: Machine, action: DoTest) -> MachineTested:
    """What checks say of it by now is true; sometimes they cannot tell."""
    ground = machine.ground
    ground.truth.tested(machine.running())
    grave = machine.monitor.grave()
    passed = None if ground.rng.random() < UNTOLD else not grave
    return MachineTested(
        machine=machine.name, action=action.id, passed=passed, why=grave or "all checks looked"
    )
