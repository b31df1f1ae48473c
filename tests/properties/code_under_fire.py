"""What people and machines may do about code: the part of the state machine that makes it up.

Mixed into CoreUnderFire (test_core_properties.py), which has the job, its core and its journal.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from everstep.actions import ControllerAction, HoldVersion, TryVersion
from everstep.core.history import Condition
from everstep.core.state import State
from everstep.events import (
    ControllerEvent,
    MachineReady,
    RollbackRequested,
    UpdateRequested,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.model import CodeVersion, Generation, MachineId, Rank, Seconds, Step, VersionId
from everstep.sightings import BadNumber, LossesCompared

V1 = VersionId("1" * 8)
VERSIONS = [V1, *(VersionId(digit * 8) for digit in "2345")]
SIZES = {version: 100 + number for number, version in enumerate(VERSIONS)}
versions = st.sampled_from(VERSIONS)
machines = st.sampled_from([MachineId(f"m{n}") for n in range(6)])


class CodeUnderFire(RuleBasedStateMachine):
    """Updates, rollbacks, and true and false answers about versions."""

    @property
    def state(self) -> State:
        raise NotImplementedError

    def tell(self, event: ControllerEvent) -> None:
        raise NotImplementedError

    def versions_of(self, machine: MachineId) -> tuple[VersionId, ...] | None:
        """What a machine says that joins: it lies there still, as far as is known."""
        known = self.state.machines.get(machine)
        return () if known is None or known.versions is None else tuple(known.versions)

    @precondition(lambda self: self.state.spec is not None)
    @rule(
        version=versions,
        on_newest=st.booleans(),
        urgent=st.booleans(),
        within_s=st.sampled_from([1.0, 8.0, 1000.0]),
        overlap=st.sampled_from([0, 0, 2, 50]),
        untried=st.sampled_from([False, False, True]),
    )
    def send(
        self,
        version: VersionId,
        on_newest: bool,
        urgent: bool,
        within_s: Seconds,
        overlap: int,
        untried: bool,
    ) -> None:
        """New code, or known code once more; built on the newest that waits, or on what runs."""
        waiting = [
            book.code.version
            for book in self.state.versions.values()
            if book.condition in (Condition.PENDING, Condition.READY)
        ]
        base = waiting[-1] if on_newest and waiting else self.state.version
        code = CodeVersion(version=version, source="/gpt", base=base, files=SIZES[version])
        self.tell(
            UpdateRequested(
                code=code,
                by="anna",
                urgent=urgent,
                within_s=within_s,
                overlap=overlap,
                untried=untried,
            )
        )

    def send_on(self, version: VersionId, *, urgent: bool) -> None:
        """Built on the newest."""
        self.send(
            version=version, on_newest=True, urgent=urgent, within_s=1e3, overlap=0, untried=False
        )

    @rule(version=st.none() | versions)
    def roll_back(self, version: VersionId | None) -> None:
        self.tell(RollbackRequested(by="anna", version=version))

    @rule(machine=machines)
    def get_ready(self, machine: MachineId) -> None:
        self.tell(MachineReady(machine=machine))

    @precondition(lambda self: self._about_code())
    @rule(data=st.data())
    def code_comes(self, data: st.DataObject) -> None:
        """All machines get what they were told to, and what is tried imports; or nothing can."""
        good = data.draw(st.sampled_from([True, True, True, False]))
        for order in self._about_code():
            self.tell(answer_about_code(order, "" if good else "disk full"))

    def _about_code(self) -> list[HoldVersion | TryVersion]:
        orders = self.state.outstanding.values()
        return [order for order in orders if isinstance(order, HoldVersion | TryVersion)]

    @precondition(lambda self: self._about_code())
    @rule(data=st.data(), machine=machines, version=versions)
    def lie_about_code(self, data: st.DataObject, machine: MachineId, version: VersionId) -> None:
        """The right id, but a machine or a version that it does not belong to; or none at all."""
        order = data.draw(st.sampled_from(self._about_code()))
        action = data.draw(st.sampled_from([order.id, "9999.0"]))
        if data.draw(st.booleans()):
            self.tell(VersionHeld(machine=machine, action=action, version=version))
        else:
            self.tell(VersionTried(machine=machine, action=action, version=version))

    @precondition(lambda self: self._about_code())
    @rule(data=st.data())
    def trial_ends(self, data: st.DataObject) -> None:
        """It does not import, or nothing can be told."""
        for order in self._about_code():
            if isinstance(order, TryVersion):
                untold = data.draw(st.sampled_from(["", "it took too long"]))
                self.tell(
                    VersionTried(
                        machine=order.machine,
                        action=order.id,
                        version=order.version,
                        problem="" if untold else "ImportError: no module named x",
                        untold=untold,
                    )
                )

    @rule(machine=machines, lag=st.sampled_from([0, 0, 1]), differs=st.booleans())
    def compare(self, machine: MachineId, lag: int, differs: bool) -> None:
        self.tell(
            LossesCompared(
                machine=machine,
                generation=Generation(max(0, self.state.generation - lag)),
                first=Step(3),
                last=Step(5),
                compared=3,
                differs=BadNumber(rank=Rank(0), step=Step(4)) if differs else None,
                before=2.0,
                after=2.5,
            )
        )


def answer_about_code(order: ControllerAction, reason: str) -> ControllerEvent:
    """A good one without a reason."""
    if isinstance(order, TryVersion):
        return VersionTried(
            machine=order.machine, action=order.id, version=order.version, untold=reason
        )
    assert isinstance(order, HoldVersion)
    if reason:
        return VersionNotHeld(
            machine=order.machine, action=order.id, version=order.version, reason=reason
        )
    return VersionHeld(machine=order.machine, action=order.id, version=order.version)
