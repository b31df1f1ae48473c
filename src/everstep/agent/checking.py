"""The checks of this machine as the agent runs them: made of the job's spec, shown if it says so.

Used by the shell. What they say is posted to the core, which passes it on to the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, NoReturn

from everstep.agent.checks import metrics
from everstep.agent.checks.check import AnyCheck, AnySource
from everstep.agent.checks.judging import Failed, attempt
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.agent.checks.memory import ChecksMemory
from everstep.agent.checks.metrics import exposition
from everstep.agent.checks.monitor import Said
from everstep.agent.checks.registry import CHECKS, make_checks, make_source
from everstep.agent.checks.runner import Job, Runner
from everstep.agent.checks.surroundings import Surroundings
from everstep.agent.log import say
from everstep.agent.testing import Checked
from everstep.agent.this_machine import ThisMachine
from everstep.model import ChecksSpec, UserError


class Machine(NamedTuple):
    """What the agent has that the checks need."""

    here: ThisMachine
    environ: Mapping[str, str]
    pids: Callable[[], Iterable[int]]
    """Of the ranks that run now."""
    tell: Callable[[tuple[Said, ...]], None]


class Checking:
    """All checks of one agent."""

    def __init__(self, machine: Machine) -> None:
        spec = machine.here.spec.checks
        self._here = machine.here
        surroundings = Surroundings(machine.here, machine.environ, machine.pids)
        checks = usable_checks(spec)
        sources = _make_sources(checks)
        self.runner = Runner(
            Job(
                machine=machine.here.setup.machine,
                here=surroundings.now,
                directory=machine.here.paths.root,
                tell=machine.tell,
            ),
            checks,
            sources,
            ChecksMemory(machine.here.shm / "checks", boot_id()),
        )
        self.checked = Checked(
            checks=checks,
            here=surroundings.now,
            directory=machine.here.paths.root,
            remembered=self.runner.monitor.remembered,
        )
        """For tests of this machine."""

    async def run(self) -> NoReturn:
        """Until cancelled."""
        server = None
        port, address = self._here.spec.checks.metrics_port, self._here.setup.address
        if port:
            server = await metrics.serve(address, port, lambda: exposition(self.runner.seen()))
        try:
            await self.runner.run()
        finally:
            await metrics.close(server)


def _make_sources(checks: list[AnyCheck]) -> dict[str, AnySource]:
    found = {}
    for name in {check.source: None for check in checks}:
        source = attempt(partial(make_source, name))
        if isinstance(source, Failed):
            say(f"checks: source {name}: {source.why}")
        else:
            found[name] = source
    return found


def usable_checks(spec: ChecksSpec) -> list[AnyCheck]:
    """All that are on, with the job's limits.

    `everstep run` has refused wrong limits, but this may be another version: a check whose limits
    are not understood stays off, since with its own it might do what the site forbade.
    """
    if not spec.on:
        return []
    limits: dict[str, Mapping[str, object]] = {}
    for name, fields in spec.limits.items():
        try:
            make_checks({name: fields})
        except UserError as error:
            say(f"checks: {error}")
            if name in CHECKS:
                limits[name] = {"off": True}
        else:
            limits[name] = fields
    return make_checks(limits)
