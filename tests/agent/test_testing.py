"""A test of a machine: one fresh look with all checks, in the agent and by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from everstep.agent.checks import looking, registry
from everstep.agent.checks.check import Here
from everstep.agent.checks.monitor import Monitor, Remembered, Standing
from everstep.agent.testing import Checked, Testing, Told, all_checks
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from everstep.model import MachineId, Seconds
from tests.commands import odd_checks

ROOT = Path(__file__).parents[2]


class Host:
    """A machine whose checks look at files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remembered = Remembered()
        self.checks = registry.make_checks({})

    def write(self, name: str, value: object) -> None:
        (self.root / name).write_text(f"{value}")

    def tested(self, within_s: Seconds = 60.0) -> Told:
        checked = Checked(self.checks, lambda: Here(root=str(self.root)), self.root, self._knows)
        return asyncio.run(Testing([all_checks(checked)]).test(within_s))

    def _knows(self) -> Remembered:
        return self.remembered


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    monkeypatch.setattr(looking, "BETWEEN_S", 0.0)
    for there in (registry.SOURCES, registry.CHECKS):
        for name in list(there):
            monkeypatch.delitem(there, name)
    odd_checks.add(monkeypatch.setitem)
    return Host(tmp_path)


def test_a_sound_machine_passes_and_says_how_much_was_looked_at(host: Host) -> None:
    host.write("counter", 7)
    assert host.tested() == Told(True, "2 checks looked and found nothing")


def test_what_hangs_fails_and_holds_up_nothing(host: Host) -> None:
    host.write("counter", 7)
    host.write("hung", "")
    assert host.tested() == Told(False, "odd.hung says: the driver does not answer")


def test_who_is_late_tells_nothing(host: Host) -> None:
    host.write("counter", 7)
    host.write("slow", "")
    told = host.tested(within_s=5.0)
    assert told.passed is None
    assert told.why.endswith("slow gave no answer in time")


def test_where_nothing_can_be_looked_at_nothing_is_told(host: Host) -> None:
    assert host.tested() == Told(None, "no check could run")
    host.checks = []
    assert host.tested() == Told(None, "checks are off in this job")


def test_counters_are_compared_with_what_they_were(host: Host) -> None:
    """What grew since the agent looked last would be no news for who looks for the first time."""
    host.write("counter", 7)
    first = _history(host)
    host.write("counter", 700)
    assert host.tested().passed
    host.remembered = first
    tested = host.tested()
    assert tested.passed is False
    assert "it grew by 693" in tested.why


def _history(host: Host) -> Remembered:
    monitor = Monitor(MachineId(""), host.checks, Remembered())
    looks = looking.Looking(host.checks, monitor, host.root)

    async def once() -> None:
        await looks.look(Here(root=str(host.root)), 30.0, "late")
        await looks.close()

    asyncio.run(once())
    return monitor.remembered()


@pytest.mark.parametrize("verdict", [Verdict.EVICT, Verdict.WARN])
def test_what_the_agents_checks_say_all_the_time_fails_if_it_is_grave(
    host: Host, verdict: Verdict
) -> None:
    host.write("counter", 7)
    result = Result(check="odd.growth", item="eth0", verdict=verdict, why="it is broken")
    standing = Standing(source="counter", check="odd.growth", item="eth0", told=result)
    host.remembered = Remembered(standings=[standing])
    tested = host.tested()
    assert tested.passed is (verdict is Verdict.WARN)
    if not tested.passed:
        assert tested.why == (
            "its checks say so all the time: odd.growth says of eth0: it is broken"
        )


def test_the_first_part_that_finds_something_ends_the_test() -> None:
    asked: list[str] = []

    def part(name: str, told: Told) -> object:
        async def run(within_s: Seconds) -> Told:
            assert 0 < within_s <= 30
            asked.append(name)
            return told

        return run

    parts = [
        part("looks", Told(True, "it looks well")),
        part("burns", Told(False, "it burns")),
        part("never", Told(True, "never")),
    ]
    told = asyncio.run(Testing(parts).test(30.0))  # type: ignore[arg-type]
    assert (asked, told) == (["looks", "burns"], Told(False, "it burns"))


def test_a_part_that_does_not_end_is_given_up() -> None:
    async def for_ever(_: Seconds) -> Told:
        await asyncio.Event().wait()
        raise AssertionError

    told = asyncio.run(Testing([for_ever]).test(0.05))
    assert told == Told(None, "the test did not end within 0.05 s")
