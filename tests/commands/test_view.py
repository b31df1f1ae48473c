"""The viewer against a controller that plays a part: what it shows, when it stops, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.commands import view
from everstep.commands.client import Client, TokenRefused
from everstep.commands.plan import Shown
from everstep.commands.presses import Presses
from everstep.commands.screen import Screen
from everstep.commands.view import JobGone, Seen, Viewer, Watched
from everstep.model import MachineId
from everstep.processes import identify
from tests.commands.fake_controller import (
    FakeController,
    ended_view,
    incident_view,
    job_in,
    listening,
    machine_view,
    status_view,
)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeController]:
    with listening(job_in(tmp_path)) as controller:
        yield controller


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "WAIT_S", 0.02)
    monkeypatch.setattr(view, "STATUS_EVERY_S", 0.0)
    monkeypatch.setattr(view, "AWAY_POLL_S", 0.02)
    monkeypatch.setattr(view, "UNHEARD_S", 0.3)


def watch(fake: FakeController, *, url: str | None = None, **more: Any) -> Seen:
    with Presses() as presses, Client(fake.paths, url=url) as client, Screen() as screen:
        return Viewer(Watched(fake.paths, client, 2, **more), screen, presses).watch()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_output_incidents_and_the_end_are_shown(
    fake: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.output(3, "loss 1.5")

    def story(number: int) -> None:
        if number == 2:
            fake.incidents = (incident_view(),)
            fake.status = status_view(incident="i1", incidents=1)
        if number == 3:
            fake.incidents = (incident_view(closed_at=9.0, outcome="recovered", restored=7),)
            fake.status = status_view(incidents=1, generation=2, restored=7)
        if number == 4:
            fake.output(0, "the last line")
            fake.end(detail="Traceback: of the user")

    fake.on_status = story
    assert watch(fake).exit_code == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["[rank3]: loss 1.5", "[rank0]: the last line"]
    told = shown.err
    assert told.count("incident i1 opened: rank 3 died of signal 9") == 1
    assert told.count("incident i1 closed: recovered; restored step 7") == 1
    assert "detecting 0.25 s, restarting 1.50 s" in told
    assert "generation 2 begins, from step 7" in told
    assert "what happened" in told
    assert "Traceback: of the user" in told
    assert told.rstrip().endswith("everstep: job j finished: so it was")


def test_the_exit_code_is_the_jobs(fake: FakeController) -> None:
    fake.end(exit_code=17)
    assert watch(fake).exit_code == 17


def test_ranks_that_were_not_asked_for_stay_off_the_terminal(
    fake: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        fake.output(rank, f"I am {rank}")
    fake.end()
    watch(fake, shown=Shown(only=(1,)))
    assert capsys.readouterr().out.splitlines() == ["[rank1]: I am 1", "[rank3]: I am 3"]


def test_a_host_among_several_shows_its_own_ranks_and_leaves_incidents_to_another(
    fake: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        fake.output(rank, f"I am {rank}")
    fake.incidents = (incident_view(),)
    fake.status = status_view(incidents=1, incident="i1", machines=(), notes=("a note",))

    def take_a_position(count: int) -> None:
        if count == 3:
            fake.status = status_view(
                incidents=1, incident="i1", machines=(machine_view("m1", 1, (2, 3)),)
            )
        if count == 6:
            fake.end()

    fake.on_status = take_a_position
    watch(fake, machine=MachineId("m1"), reports=False)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["[rank2]: I am 2", "[rank3]: I am 3"]
    assert shown.err == "everstep: job j finished: so it was\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_stops_the_job_and_waits_for_its_end(
    fake: FakeController, number: signal.Signals
) -> None:
    fake.on_status = lambda count: os.kill(os.getpid(), number) if count == 2 else None
    fake.on_post = lambda _: fake.end(exit_code=130)
    before = signal.getsignal(number)
    assert watch(fake).exit_code == 130
    assert [path for path, _ in fake.posted] == ["/v1/stop"]
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_ends_everything_of_the_job_here(
    fake: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [sys.executable, "-m", "everstep.agent", str(fake.paths.root / "sleeps")]
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)", *argv[1:]]
    left = subprocess.Popen(sleeper)
    fake.on_status = lambda count: press() if count in (2, 4) else None
    seen = watch(fake)
    assert seen == Seen(130, None, None)
    assert left.wait(10) == -signal.SIGKILL
    assert "ended by force" in capsys.readouterr().err


def test_a_stop_that_finds_no_controller_is_given_to_the_next_one(
    fake: FakeController, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "UNHEARD_S", 60.0)

    def vanish(count: int) -> None:
        if count == 2:
            fake.later(fake.go, press, lambda: fake.come(term=2))

    fake.on_status = vanish
    fake.on_post = lambda _: fake.end(exit_code=130)
    assert watch(fake).exit_code == 130
    assert [path for path, _ in fake.posted] == ["/v1/stop"]
    assert capsys.readouterr().err.count("the job will be stopped when it is back") == 1


def test_a_controller_that_comes_back_elsewhere_is_found_and_no_line_is_lost_or_doubled(
    fake: FakeController, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "UNHEARD_S", 60.0)
    fake.output(0, "before")

    def vanish(count: int) -> None:
        if count == 2:
            fake.later(fake.go, return_elsewhere)

    def return_elsewhere() -> None:
        fake.status = status_view(term=2)
        fake.output(0, "meanwhile")
        fake.on_status = lambda count: fake.end() if count > 4 else None
        fake.come(term=2)

    fake.on_status = vanish
    assert watch(fake).exit_code == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["[rank0]: before", "[rank0]: meanwhile"]
    assert shown.err.count("the controller does not answer; ranks go on") == 1
    assert shown.err.count("the controller is back, term 2") == 1


def test_a_job_of_which_nothing_is_left_is_not_waited_for_for_ever(fake: FakeController) -> None:
    fake.go()
    with pytest.raises(JobGone, match="Nothing of job j runs on this host any more"):
        watch(fake)


def test_a_viewer_on_another_host_has_the_result_from_the_controller(
    fake: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.status = ended_view(exit_code=3, detail="Traceback: of rank 1")
    fake.on_status = lambda count: fake.later(fake.go) if count == 2 else None
    assert watch(fake, url=fake.url).exit_code == 3
    assert "Traceback: of rank 1" in capsys.readouterr().err


def test_a_token_of_another_job_is_one_sentence(fake: FakeController) -> None:
    fake.token = "another"
    with pytest.raises(TokenRefused, match=r"refuses the token of .*/j/token"):
        watch(fake)


def test_what_a_controller_that_does_not_come_up_says_is_passed_on(
    fake: FakeController, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.go()
    me = identify(os.getpid())
    assert me is not None
    fake.paths.keeper_pid.write_text(f"{me.pid} {me.start_ticks}")
    os.mkfifo(fake.paths.controller_log)  # it is read once, and the job ends after that

    def say_and_end() -> None:
        fake.paths.controller_log.write_text("everstep controller: no space left\n")
        fake.end(1)

    fake.later(say_and_end)
    assert watch(fake).exit_code == 1
    assert "no space left" in capsys.readouterr().err
