"""Does harm to a simulated world, as long as faults are allowed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.core.faults import objection
from everstep.events import FaultRequested, RollbackRequested, StopRequested
from everstep.health import Result
from everstep.model import NO_VERSION, ExitStatus, Fault, RankError
from everstep.sightings import StacksRequested
from everstep.sim.checks import MAKERS, down_link, foreign, hung_storage, kernel_fault
from everstep.sim.hanging import OF_MACHINES, Hold
from everstep.sim.machine import Machine
from everstep.sim.options import Harm
from everstep.sim.training import Process
from everstep.sim.world import World

SECOND = 0.2
"""Chance that a rank is held up, or a machine cut off, while others are."""
ERROR = RankError(kind="ValueError", message="no", traceback="Traceback: ValueError: no")


class Nemesis:
    """Picks a fault and a victim every now and then, by the options' chances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ground = world.ground
        self._rng = world.ground.rng
        self.asked_to_stop = False
        self._methods: dict[Harm, Callable[[], None]] = {
            harm: getattr(self, harm.value) for harm in world.ground.options.harms
        }
        if self._methods:
            self._plan()

    def _plan(self) -> None:
        every_s = self._ground.options.harm_every_s
        self._ground.schedule.after(self._rng.expovariate(1.0 / every_s), self._strike)

    def _strike(self) -> None:
        if not self._ground.calm:
            harm = self._rng.choice(self._ground.options.harms)
            self._ground.tell(f"{self._ground.schedule.now:.3f} --- {harm}")
            self._methods[harm]()
            self._plan()

    def _machine(self) -> Machine | None:
        alive = self._world.cluster.alive
        return self._rng.choice(alive) if alive else None

    def _process(self) -> Process | None:
        running = [p for machine in self._world.cluster.alive for p in machine.running()]
        return self._rng.choice(running) if running else None

    # --- ranks ---

    def kill_rank(self) -> None:
        process = self._process()
        if process is not None:
            self._world.cluster.machines[process.machine].kill(process)

    def fail_rank(self) -> None:
        """With a Python exception, but not before the first step: that one is the user's."""
        process, controller = self._process(), self._world.controller
        if process is not None and not process.stuck:
            proven = controller.alive and controller.state.proven
            gang = self._ground.gangs[process.generation]
            gang.end(process, ExitStatus(code=1), ERROR if proven else None)

    def stick(self) -> None:
        """The next process that is to be killed on some machine hangs in a driver for a while."""
        machine = self._machine()
        if machine is not None:
            machine.sticks = True
            self._ground.schedule.after(self._rng.uniform(1.0, 40.0), machine.unstick)

    def hang(self) -> None:
        """A rank does nothing any more; sometimes it goes on by itself, seldom it is the second."""
        process = self._process()
        if process is None:
            return
        stands = self._ground.gangs[process.generation].stands(self._ground.schedule.now)
        if not stands or self._rng.random() < SECOND:
            for_s = self._rng.choice([float("inf"), self._rng.uniform(1.0, 90.0)])
            machine = self._world.cluster.machines[process.machine]
            machine.hold_up(process, self._rng.choice(list(Hold)), for_s)

    # --- machines ---

    def sicken(self) -> None:
        """What is started there from now on is held up before long."""
        machine = self._machine()
        if machine is not None:
            machine.sick = self._rng.choice(OF_MACHINES)

    def sever(self) -> None:
        machine = self._machine()
        cut = any(not other.answers() for other in self._world.cluster.alive)
        if machine is not None and (not cut or self._rng.random() < SECOND):
            machine.sever(self._rng.uniform(0.5, 120.0))

    def fall_mute(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.fall_mute(self._rng.uniform(1.0, 90.0))

    def slow_down(self) -> None:
        """Seldom for good."""
        machine = self._machine()
        if machine is not None:
            machine.slow_down(self._rng.choice([1 / 0.95, 1 / 0.7]))
            if self._rng.random() < 0.7:
                faster = self._rng.uniform(10.0, 120.0)
                self._ground.schedule.after(faster, machine.speed_up)

    def kill_agent(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.kill_agent()

    def kill_launcher(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.kill_launcher()

    def break_launcher(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.breaks_forks += 1

    def lose_machine(self) -> None:
        machine = self._machine()
        if machine is not None:
            self._world.cluster.lose(machine)

    def reboot(self) -> None:
        """Sometimes all at once, as when the power of a hall fails."""
        alive = self._world.cluster.alive
        together = self._rng.random() < 0.5
        for machine in alive if together else [m for m in [self._machine()] if m is not None]:
            machine.reboot()

    def cut_off(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.cut_off(self._rng.uniform(0.5, 30.0))

    def isolate(self) -> None:
        """Its cable is pulled; sometimes those of a whole switch."""
        machine = self._machine()
        if machine is not None:
            for_s = self._rng.uniform(0.5, 40.0)
            switch = machine.units if self._rng.random() < 0.3 else ()
            for other in self._world.cluster.alive:
                if other is machine or other.units == switch:
                    other.isolate(for_s)

    # --- checks ---

    def alert(self) -> None:
        """Right or wrong; mostly over after a while, and sometimes told by somebody else."""
        machine = self._machine()
        if machine is None:
            return
        result = self._rng.choice(MAKERS)(self._rng)
        if self._rng.random() < 0.2:
            told = foreign(machine.name, result, self._rng.uniform(0.0, 60.0))
            if self._world.controller.alive:
                self._world.controller.post(told)
            return
        self._says(machine, result)

    def alert_many(self) -> None:
        """What several machines share: a storage, a kernel, a switch."""
        machine = self._machine()
        if machine is None:
            return
        result = self._rng.choice([hung_storage(self._rng), kernel_fault(machine), None])
        for other in self._world.cluster.alive:
            if other is machine or self._rng.random() < 0.7:
                self._says(other, result or down_link(self._rng))

    def flap(self) -> None:
        """A link that goes down again and again."""
        machine = self._machine()
        if machine is not None:
            for _ in range(self._rng.randint(1, 4)):
                at_s = self._rng.uniform(0.0, 60.0)
                flaps = partial(self._says, machine, down_link(self._rng))
                self._ground.schedule.after(at_s, flaps)

    def _says(self, machine: Machine, result: Result) -> None:
        if not machine.alive:
            return
        raised = machine.monitor.fails(result, self._ground.schedule.now)
        if machine.agent is not None:
            machine.agent.checked(raised)
        if self._rng.random() < 0.7:
            over = partial(self._says_no_more, machine, result)
            self._ground.schedule.after(self._rng.uniform(0.5, 60.0), over)

    def _says_no_more(self, machine: Machine, result: Result) -> None:
        cleared = machine.monitor.passes(result)
        if machine.agent is not None:
            machine.agent.checked(cleared)

    def volunteer(self) -> None:
        self._world.cluster.start(1)

    def fill_disk(self) -> None:
        self._ground.disk.full = True
        self._ground.schedule.after(
            self._rng.uniform(1.0, 20.0), partial(setattr, self._ground.disk, "full", False)
        )

    # --- the controller ---

    def kill_controller(self) -> None:
        self._world.controller.die()

    def rival_controller(self) -> None:
        """A second one is started by hand; the first one is fenced at its next word."""
        self._world.start_controller()

    def power_failure(self) -> None:
        """The controller's host goes down: what was not synced is lost."""
        self._world.controller.die()
        if self._ground.ledger.lose_unsynced():
            self._ground.truth.rewind(self._ground.ledger)

    def ask_for_fault(self) -> None:
        controller = self._world.controller
        request = FaultRequested(fault=self._rng.choice(list(Fault)))
        if controller.alive and objection(controller.state, request) is None:
            controller.post(request)

    def update(self) -> None:
        """Somebody sends other code."""
        controller = self._world.controller
        if controller.alive and controller.state.version != NO_VERSION:
            flaws = self._ground.options.flaws
            controller.post(self._ground.codes.request(controller.state, flaws))

    def update_twice(self) -> None:
        """Two at once: the second one mostly knows of the first."""
        self.update()
        self.update()

    def rollback(self) -> None:
        """Somebody wants an earlier version, often without a name; it may never have run."""
        controller = self._world.controller
        if controller.alive and controller.state.version != NO_VERSION:
            version = self._rng.choice([None, *controller.state.versions])
            controller.post(RollbackRequested(by="somebody", version=version))

    def ask_for_stacks(self) -> None:
        if self._world.controller.alive:
            self._world.controller.post(StacksRequested(by="somebody"))

    def ask_to_stop(self) -> None:
        if self._world.controller.alive and self._rng.random() < 0.1:
            self.asked_to_stop = True
            self._world.controller.post(StopRequested(by="somebody"))
