"""The owner of the machines: starts them, takes them away, and sees some of them die."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.events import MachineLost
from everstep.model import MachineId
from everstep.sim.ground import Ground
from everstep.sim.machine import Machine

Report = Callable[[MachineLost], None]


class Cluster:
    """All machines of one run. Names are never used twice."""

    def __init__(self, ground: Ground) -> None:
        self.machines: dict[MachineId, Machine] = {}
        self._ground = ground
        self._report: Report | None = None
        self._witnessed: dict[MachineId, None] = {}
        self._requests: dict[str, str] = {}
        self._started = 0

    @property
    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.alive]

    def report_to(self, report: Report) -> None:
        """A controller begins: it is told what was lost while there was none, too."""
        self._report = report
        for machine in self._witnessed:
            self._ground.schedule.after(0.1, partial(self._say_lost, machine))

    def start(self, count: int) -> None:
        """So many more machines, each in its own time."""
        for _ in range(count):
            name = MachineId(f"m{self._started}")
            self._started += 1
            boots_s = self._ground.rng.uniform(0.0, 5.0)
            self._ground.schedule.after(boots_s, partial(self._boot, name))

    def request(self, count: int, action: str) -> str:
        """The same request is the same machines. Returns why it is refused, empty if it is not."""
        if action not in self._requests:
            ground = self._ground
            refused = not ground.calm and ground.rng.random() < ground.options.refused
            self._requests[action] = "the pool is empty" if refused else ""
            if not refused:
                self.start(count)
        return self._requests[action]

    def release(self, name: MachineId) -> None:
        """Take an evicted machine away, or leave that to its agent."""
        machine = self.machines.get(name)
        ground = self._ground
        if machine is not None and ground.rng.random() < ground.options.released:
            ground.schedule.after(ground.rng.uniform(0.1, 3.0), machine.leave)

    def lose(self, machine: Machine) -> None:
        """The machine dies; whether anybody but its peers notices is chance."""
        machine.lose()
        if self._ground.rng.random() < self._ground.options.witnessed:
            self._witnessed[machine.name] = None
            noticed_s = self._ground.rng.uniform(0.05, 20.0)
            self._ground.schedule.after(noticed_s, partial(self._say_lost, machine.name))

    def tell_all(self) -> None:
        """At last somebody looks, and says which machines are gone."""
        for machine in self.machines.values():
            if not machine.alive and machine.name not in self._witnessed:
                self._witnessed[machine.name] = None
                self._say_lost(machine.name)

    def _boot(self, name: MachineId) -> None:
        """Sometimes it is a host that was here before under another name."""
        used = {machine.host for machine in self.alive}
        free = sorted({machine.host for machine in self.machines.values()} - used)
        ground = self._ground
        again = free and not ground.calm and ground.rng.random() < ground.options.hosts_again
        host = ground.rng.choice(free) if again else f"host-{name}"
        self.machines[name] = Machine(name, ground, host)

    def _say_lost(self, machine: MachineId) -> None:
        if self._report is not None:
            self._report(MachineLost(machine=machine, witness="the cluster saw it die"))
