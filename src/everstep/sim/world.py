"""A whole simulated job: machines, their owner, a controller and whoever brings it back."""

from __future__ import annotations

from collections.abc import Callable

from everstep.core.state import Phase
from everstep.model import Seconds
from everstep.sim.cluster import Cluster
from everstep.sim.controller import Controller
from everstep.sim.ground import Ground
from everstep.sim.options import Options

BACK_S: Seconds = 3.0
LOOKED_AFTER_EVERY_S: Seconds = 10.0


class World:
    """Of one run."""

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self.ground = Ground(options, tell)
        self.cluster = Cluster(self.ground)
        self.cluster.start(options.spec.nnodes + options.spec.standbys)
        self.controller = self.start_controller()

    @property
    def over(self) -> bool:
        """Whether the controller ended its job."""
        return self.controller.alive and self.controller.state.phase is Phase.ENDED

    def start_controller(self) -> Controller:
        """The next term, maybe while the former one still runs."""
        controller = Controller(self.ground, self.cluster, self._controller_died)
        self.controller = controller
        self.ground.controller = controller
        return controller

    def _controller_died(self) -> None:
        """Its keeper starts the next one, unless there is one already."""
        longest_s = BACK_S if self.ground.calm else self.ground.options.away_s
        away_s = self.ground.rng.uniform(0.2, longest_s)
        self.ground.schedule.after(away_s, self._restart_controller)

    def _restart_controller(self) -> None:
        if not self.controller.alive:
            self.start_controller()

    def heal(self) -> None:
        """No more faults: everything that can come back comes back, and machines do not run out."""
        ground = self.ground
        ground.calm = True
        ground.disk.full = False
        for machine in self.cluster.alive:
            machine.heal()
        self._look_after()

    def _look_after(self) -> None:
        """Somebody says now and then which machines are gone, and adds those that are lacking."""
        self.cluster.tell_all()
        evicted = self.ground.truth.watch.evicted
        usable = sum(machine.name not in evicted for machine in self.cluster.alive)
        self.cluster.start(self.ground.options.spec.nnodes - usable)
        self._mend_code()
        self.ground.schedule.after(LOOKED_AFTER_EVERY_S, self._look_after)

    def _mend_code(self) -> None:
        """What cannot be gone back from, a person mends."""
        codes = self.ground.codes
        if self.controller.alive and self.ground.truth.code_may_end_it(codes):
            request = codes.mend(self.controller.state)
            if request is not None:
                self.controller.post(request)
