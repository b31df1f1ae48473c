"""The runner with real files, pipes, children and memory: what is said, what a restart does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from everstep.agent.checks import runner as module
from everstep.agent.checks.check import Check, Here, History, Limits, Source, Stamped
from everstep.agent.checks.memory import ChecksMemory, Kept, KeptChild
from everstep.agent.checks.monitor import Remembered, Said
from everstep.agent.checks.runner import Job, Runner, next_due
from everstep.diagnosis.words import Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Result
from everstep.model import MachineId, Seconds, Value
from everstep.processes import alive
from tests.agent.checks.parts import Mood, Moody, Pid, PidCheck, Words, WordsCheck, WordsSource
from tests.agent.support import DEADLINE_S

ROOT = Path(__file__).parents[3]
BOOT = "a-boot"


class Quick(WordsCheck):
    """Is over soon."""

    clear_after_s: ClassVar[Seconds] = 0.2


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setattr(module, "SPREAD_S", 0.01)
    monkeypatch.setattr(module, "ABSENT_AGAIN_S", 0.02)
    monkeypatch.setattr(module, "ERROR_PAUSE_S", 0.02)
    monkeypatch.setattr(module, "REMEMBER_EVERY_S", 0.02)


class Machine:
    """What survives an agent: files, and what the controller was told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[Said] = []
        self.told_in_file: list[int] = []
        """Alerts in its memory, each time something was said."""
        self.boot = BOOT
        self.checks: list[Check[Any, Any]] = [Quick(Limits()), PidCheck(Limits())]
        self.sources: dict[str, Source[Any]] = {"words": WordsSource(), "moody": Moody()}
        self.file = root / "checks"

    def write(self, name: str, text: str) -> None:
        beside = self.root / f"{name}.new"
        beside.write_text(text)
        beside.replace(self.root / name)

    def runner(self) -> Runner:
        return Runner(
            Job(
                machine=MachineId("m0"),
                here=lambda: Here(root=str(self.root)),
                directory=self.root,
                tell=self.tell,
            ),
            self.checks,
            self.sources,
            ChecksMemory(self.file, self.boot),
        )

    def run(self, *looks: Callable[[Runner], object], killed: bool = False) -> Runner:
        """An agent that lives until each of these was true, one after the other."""
        return asyncio.run(self._run(looks, killed=killed))

    async def _run(self, looks: Iterable[Callable[[Runner], object]], *, killed: bool) -> Runner:
        runner = self.runner()
        task = asyncio.create_task(runner.run())
        try:
            for look in looks:
                deadline = time.monotonic() + DEADLINE_S
                while not look(runner):
                    assert not task.done(), task.exception()
                    assert time.monotonic() < deadline, f"in vain: {self.said} {runner.counts}"
                    await asyncio.sleep(0.005)
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not killed:
                await runner.close()
        return runner

    def tell(self, said: tuple[Said, ...]) -> None:
        kept = msgspec.msgpack.decode(self.file.read_bytes(), type=Kept)
        self.told_in_file.append(sum(each.told is not None for each in kept.standings))
        self.said.extend(said)

    def raised(self, item: str | None = None) -> list[Result]:
        found = [each.alert.result for each in self.said if isinstance(each, AlertRaised)]
        return [each for each in found if item is None or each.item == item]

    def over(self) -> list[str]:
        return [each.item for each in self.said if isinstance(each, AlertCleared)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write("mood", "answer")
    return made


def samples(name: str, count: int) -> Callable[[Runner], bool]:
    """Whether so many were taken by now."""
    return lambda runner: runner.counts[name].samples >= count


def test_sources_are_asked_and_what_fails_is_told(machine: Machine) -> None:
    machine.write("words", "eth0 info\neth1 evict")

    def mend(runner: Runner) -> bool:
        machine.write("words", "eth0 info\neth1 info")
        return bool(machine.over())

    runner = machine.run(samples("words", 5), samples("moody", 3), mend)
    assert [(each.item, each.verdict) for each in machine.raised()] == [("eth1", Verdict.EVICT)]
    assert machine.over() == ["eth1"]
    assert {each.item for each in runner.monitor.latest["test.words"]} == {"eth0", "eth1"}
    counts = runner.counts["moody"]
    assert counts.cpu_seconds > 0
    assert counts.unanswered == 0


def test_a_source_that_cannot_be_read_costs_its_own_checks_only(machine: Machine) -> None:
    machine.write("words", "defect")

    def failed(runner: Runner) -> bool:
        return runner.counts["words"].not_sampled >= 3

    def mend(runner: Runner) -> bool:
        machine.write("words", "eth0 warn")
        return bool(machine.raised())

    runner = machine.run(failed, samples("moody", 2), mend)
    assert runner.monitor.could_not_run["test.words"] >= 3
    assert not runner.monitor.could_not_run["test.pid"]


def test_all_have_looked_once_each_had_its_turn_whatever_came_of_it(machine: Machine) -> None:
    machine.write("words", "secret")
    runner = machine.run(lambda runner: runner.looked.is_set())
    assert runner.counts["words"].not_sampled > 0
    assert runner.counts["moody"].samples > 0
    (machine.root / "words").unlink()
    assert machine.run(lambda runner: runner.looked.is_set()).counts["moody"].samples > 0


def test_the_log_says_once_what_cannot_be_read(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.write("words", "secret")
    machine.run(lambda runner: runner.counts["words"].not_sampled >= 3)
    assert capsys.readouterr().out.count("source words: secret") == 1


def test_what_is_absent_is_asked_for_again_and_what_was_there_is_not(machine: Machine) -> None:
    def absent(runner: Runner) -> bool:
        return runner.counts["words"].absent == "there are no words"

    def plug(runner: Runner) -> bool:
        machine.write("words", "eth0 info")
        return runner.counts["words"].samples >= 2

    def gone(runner: Runner) -> bool:
        (machine.root / "words").unlink(missing_ok=True)
        return runner.counts["words"].not_sampled >= 3

    runner = machine.run(absent, plug, gone)
    assert not runner.counts["words"].absent
    again = machine.run(lambda runner: runner.counts["words"].not_sampled)
    assert not again.counts["words"].absent, "it was there, so now it is missed"


# --- news ----------------------------------------------------------------------------------------


class Told(WordsSource):
    """Has a pipe that is readable when there is something new."""

    every_s: ClassVar[Seconds] = 1000.0

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.looks = 0

    def absent(self, here: Here) -> str:
        return ""

    def fileno(self, here: Here) -> int | None:
        return self.read

    def sample(self, here: Here) -> Words:
        self.looks += 1
        try:
            item = os.read(self.read, 100).decode()
        except BlockingIOError:
            return Words()
        return Words(verdicts={item: "warn"})

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


def test_news_are_read_when_they_come_and_not_when_it_is_time(machine: Machine) -> None:
    source = Told()
    machine.sources = {"words": source}
    machine.checks = [WordsCheck(Limits())]

    def tell(word: bytes) -> Callable[[Runner], bool]:
        sent: list[bytes] = []

        def look(runner: Runner) -> bool:
            if not sent:
                sent.append(word)
                os.write(source.write, word)
            return bool(machine.raised(word.decode()))

        return look

    machine.run(samples("words", 1), tell(b"one"), tell(b"two"))
    assert source.looks == 3
    source.close()


def test_a_flood_of_news_does_not_take_the_whole_agent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Told()
    machine.sources = {"words": source}
    monkeypatch.setattr(module, "PAUSE_MIN_S", 0.05)
    os.write(source.write, b"x")
    source.sample = lambda here: Words()  # type: ignore[method-assign]
    began = time.monotonic()
    runner = machine.run(samples("words", 5))
    assert runner.counts["words"].samples <= (time.monotonic() - began) / 0.05 + 2
    source.close()


def test_a_file_that_cannot_be_waited_for_is_looked_at_by_time(machine: Machine) -> None:
    class Regular(WordsSource):
        """Its file is always readable: epoll does not take it."""

        def fileno(self, here: Here) -> int | None:
            return file.fileno()

    machine.sources = {"words": Regular()}
    machine.write("words", "eth0 info")
    with (machine.root / "words").open() as file:
        machine.run(samples("words", 3))


# --- silence -------------------------------------------------------------------------------------


def test_a_child_that_does_not_answer_is_a_finding(machine: Machine) -> None:
    machine.write("mood", "hang")
    machine.checks = [PidCheck(Limits()), Mood(Limits())]

    def silent(runner: Runner) -> bool:
        return bool(machine.raised())

    runner = machine.run(silent, lambda runner: runner.counts["moody"].unanswered >= 2)
    (found,) = machine.raised()
    assert found.check == "test.mood"
    assert found.verdict is Verdict.EVICT
    (result,) = runner.monitor.latest["test.pid"]
    assert result.verdict is Verdict.ERROR
    assert "did not answer" in result.why


# --- from one agent to the next ------------------------------------------------------------------


def test_a_killed_agent_leaves_baselines_and_alerts_to_the_next(machine: Machine) -> None:
    """Nothing is said twice as news, nothing is lost, and its child is not left beside another."""
    machine.write("words", "eth0 info\neth1 warn")
    before = machine.run(samples("words", 3), samples("moody", 1), killed=True)
    first = before.monitor.remembered().histories["words"].first
    assert len(machine.said) == 1
    machine.said.clear()
    machine.write("words", "eth0 warn\neth1 warn")
    (child,) = before.children.values()
    after = machine.run(samples("words", 2), samples("moody", 1), lambda _: machine.raised("eth0"))
    assert after.monitor.remembered().histories["words"].first == first
    again, news = [each for each in machine.said if isinstance(each, AlertRaised)]
    assert (again.alert.result.item, news.alert.result.item) == ("eth1", "eth0")
    assert again.alert.age_s > 0
    assert news.alert.age_s == 0
    assert after.left_behind == [child]
    assert not alive(child)
    _reap(before)


def test_a_remembered_source_is_asked_once_whether_it_is_absent(machine: Machine) -> None:
    """It learns there what it will say of a silent child, and is read whatever it answers."""
    machine.write("words", "eth0 info")
    machine.checks = [WordsCheck(Limits())]
    memory = ChecksMemory(machine.file, machine.boot)
    machine.run(lambda _: "words" in kept(memory)[0].histories)
    asked: list[Here] = []

    class Learns(WordsSource):
        """Says that there is nothing, although there was."""

        def absent(self, here: Here) -> str:
            asked.append(here)
            return "gone"

    machine.sources = {"words": Learns()}
    runner = machine.run(samples("words", 2))
    assert len(asked) == 1
    assert runner.counts["words"].absent == ""


def _reap(killed: Runner) -> None:
    for child in killed._children.values():
        assert child._running is not None
        with child._running.popen:
            pass


def test_an_alert_is_remembered_before_it_is_told(machine: Machine) -> None:
    """Killed in between, the agent would take it for news again: a second strike of one fault."""
    machine.write("words", "eth1 warn")
    machine.checks = [WordsCheck(Limits())]
    machine.run(lambda _: machine.raised())
    assert machine.told_in_file == [1]


def test_what_ended_while_there_was_no_agent_is_told(machine: Machine) -> None:
    machine.write("words", "eth1 warn")
    machine.run(lambda _: machine.raised())
    machine.said.clear()
    machine.write("words", "eth1 info")
    machine.run(lambda _: machine.over())
    assert machine.over() == ["eth1"]
    machine.said.clear()
    machine.run(samples("words", 2))
    assert machine.over() == ["eth1"], "the former agent's last word may be lost"


# --- memory --------------------------------------------------------------------------------------


def kept(memory: ChecksMemory) -> tuple[Remembered, dict[str, KeptChild]]:
    return memory.read({"words": WordsSource(), "moody": Moody()})


def test_memory_holds_for_one_boot_only(tmp_path: Path) -> None:
    memory = ChecksMemory(tmp_path / "checks", BOOT)
    sample = Stamped(at=1.0, sample=Words(verdicts={"a": "warn"}))
    whole = Remembered(histories={"words": History(first=sample, now=sample)})
    memory.write(whole, {"moody": KeptChild(pid=7, start_ticks=8)})
    assert kept(memory) == (whole, {"moody": KeptChild(pid=7, start_ticks=8)})
    assert kept(ChecksMemory(tmp_path / "checks", "another")) == (Remembered(), {})


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80" * 5, b"\x91" * 100_000, b"{}", None])
def test_memory_that_is_none_is_forgotten(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "checks").write_bytes(content)
    assert kept(ChecksMemory(tmp_path / "checks", BOOT)) == (Remembered(), {})


def test_samples_of_another_type_are_forgotten_alone(tmp_path: Path) -> None:
    class Former(Value, frozen=True, kw_only=True):
        """As an older version had it."""

        verdicts: list[int]

    memory = ChecksMemory(tmp_path / "checks", BOOT)
    old = Stamped(at=1.0, sample=Former(verdicts=[1]))
    huge = Stamped(at=1.0, sample=Words(verdicts={"\udcff": "warn"}))
    good = Stamped(at=1.0, sample=Pid(pid=1))
    histories: dict[str, History[Any]] = {
        "words": History(first=old, now=old),
        "unwritable": History(first=huge, now=huge),
        "moody": History(first=good, now=good),
    }
    memory.write(Remembered(histories=histories), {})
    assert list(kept(memory)[0].histories) == ["moody"]


def test_memory_of_a_machine_that_was_left_is_not_made_again(tmp_path: Path) -> None:
    memory = ChecksMemory(tmp_path / "gone" / "checks", BOOT)
    memory.write(Remembered(), {})
    assert not (tmp_path / "gone").exists()


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("due", "every_s", "earliest", "next_one"),
    [
        (10.0, 2.0, 10.1, 12.0),
        (10.0, 2.0, 11.9, 12.0),
        (10.0, 2.0, 12.1, 14.0),
        (10.0, 2.0, 99.1, 100.0),
        (10.0, 0.0, 10.1, 10.1),
    ],
)
def test_what_is_late_keeps_its_rhythm_and_makes_up_for_nothing(
    due: float, every_s: float, earliest: float, next_one: float
) -> None:
    assert next_due(due, every_s, earliest) == next_one
