"""What `everstep run` writes before anything is started, and who may write it."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from everstep.commands import jobs, run
from everstep.commands.flags import parse
from everstep.commands.plan import HostFacts, Plan, plan
from everstep.commands.presses import Interrupted, Presses
from everstep.commands.run import (
    PortTaken,
    StateUnwritable,
    Waiting,
    described,
    machine_directory,
    start,
)
from everstep.files import write_atomically
from everstep.model import UserError
from everstep.paths import JobPaths, JobResult
from everstep.processes import identify


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Setups of the keepers that would have been started. None is: integration tests do."""
    setups: list[Path] = []

    def note(setup: Path, log: Path) -> object:
        del log
        setups.append(setup)
        return identify(os.getppid())

    monkeypatch.setattr(run, "start_keeper", note)
    return setups


def made(words: str, here: Path, **facts: Any) -> Plan:
    known: dict[str, Any] = {"working_dir": str(here), "cpus": 1, "gpus": 0, "uid": "0123abcd"}
    host = HostFacts(state_dir=str(here / "state"), **(known | facts))
    return plan(parse(words.split()), host)


def paths_of(made_plan: Plan) -> JobPaths:
    return JobPaths(Path(made_plan.state_dir), made_plan.spec.job)


silently = Waiting(say=lambda _: None, presses=Presses())


def over(paths: JobPaths) -> None:
    write_atomically(paths.result, JobResult(outcome="finished", exit_code=0, why="it was done"))


def test_a_job_directory_is_complete_private_and_its_keeper_started(
    started: list[Path], tmp_path: Path
) -> None:
    made_plan = made("--local-machines 2 t.py", tmp_path)
    assert start(made_plan, None, silently).leads
    paths = paths_of(made_plan)
    assert jobs.spec_of(paths) == made_plan.spec
    assert len(paths.token.read_text()) > 20
    assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(paths.token.stat().st_mode) == 0o600
    assert started == [paths.root / "keeper.json"]
    assert sorted(entry.name for entry in paths.root.parent.iterdir()) == [paths.root.name]


def test_the_token_of_the_environment_is_the_jobs(started: list[Path], tmp_path: Path) -> None:
    made_plan = made("t.py", tmp_path)
    start(made_plan, "from-the-environment", silently)
    assert paths_of(made_plan).token.read_text() == "from-the-environment"
    assert started


def test_a_name_that_was_chosen_is_not_taken_from_a_job_that_has_not_ended(
    started: list[Path], tmp_path: Path
) -> None:
    start(made("--job night t.py", tmp_path), None, silently)
    with pytest.raises(UserError, match=r"A job night is in .* and has not ended"):
        start(made("--job night t.py", tmp_path, uid="89abcdef"), None, silently)
    assert len(started) == 1


def test_a_job_that_ended_makes_room_for_the_next_of_its_name(
    started: list[Path], tmp_path: Path
) -> None:
    first = made("--job night t.py", tmp_path)
    start(first, None, silently)
    over(paths_of(first))
    start(made("--job night t.py", tmp_path, uid="89abcdef"), None, silently)
    state = Path(first.state_dir)
    assert jobs.spec_of(paths_of(first)).uid == "89abcdef"
    assert [job.root.name for job in jobs.all_jobs(state)] == ["night.1", "night"]
    assert len(started) == 2


def test_a_job_that_runs_is_not_started_twice(started: list[Path], tmp_path: Path) -> None:
    made_plan = made("--job night t.py", tmp_path)
    start(made_plan, None, silently)
    me = identify(os.getpid())
    assert me is not None
    paths_of(made_plan).keeper_pid.write_text(f"{me.pid} {me.start_ticks}")
    with pytest.raises(UserError, match="Job night runs already"):
        start(made_plan, None, silently)
    assert len(started) == 1


def test_a_port_in_use_is_one_sentence_and_leaves_nothing(
    started: list[Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        words = f"--nnodes 2 --node-rank 0 --master-port {port} t.py"
        with pytest.raises(PortTaken, match=f"Port {port} of 127.0.0.1 is in use"):
            start(made(words, tmp_path), None, silently)
    assert not started
    assert not (tmp_path / "state").exists()


def test_a_state_directory_that_cannot_be_written_is_one_sentence(
    started: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file is in the way")
    with pytest.raises(StateUnwritable, match=r"--state-dir or \$EVERSTEP_HOME"):
        start(made("t.py", tmp_path), None, silently)
    assert not started


def test_the_leading_host_joins_as_a_machine_too(started: list[Path], tmp_path: Path) -> None:
    made_plan = made("--nnodes 2 --node-rank 0 --master-port 29999 t.py", tmp_path)
    result = start(made_plan, None, silently)
    paths = paths_of(made_plan)
    assert result.machine is not None
    assert result.machine.endswith("-0")
    setup = paths.machine(result.machine).setup.read_text()
    assert '"endpoint_url":"http://127.0.0.1:29999"' in setup
    assert '"node_rank":0' in setup
    assert [setup.parent.name for setup in started] == [paths.root.name, result.machine]


def test_a_machine_that_never_finds_its_controller_says_what_was_missing(
    started: list[Path], tmp_path: Path
) -> None:
    words = "--nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:9 --rdzv-conf join_timeout=0 t.py"
    with pytest.raises(UserError, match=r"There is no token: set EVERSTEP_TOKEN") as raised:
        start(made(words, tmp_path), None, silently)
    assert "was not joined within 0 s" in str(raised.value)
    with pytest.raises(UserError, match=r"No controller answers at http://127\.0\.0\.1:9"):
        start(made(words, tmp_path), "a-token", silently)
    assert not started


def test_ctrl_c_while_waiting_for_the_controller_starts_nothing(
    started: list[Path], tmp_path: Path
) -> None:
    pressed = Presses()
    pressed.count = 1
    made_plan = made("--nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:9 t.py", tmp_path)
    with pytest.raises(Interrupted, match="nothing was started"):
        start(made_plan, "a-token", Waiting(lambda _: None, pressed))
    assert not started


def test_no_two_machines_of_a_host_get_one_name(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path, made("t.py", tmp_path).spec.job)
    names = [machine_directory(paths, None), machine_directory(paths, None)]
    names.append(machine_directory(paths, 0))
    assert len(set(names)) == 3


def test_a_log_directory_leads_to_the_ranks_output(started: list[Path], tmp_path: Path) -> None:
    made_plan = made("--job night --log-dir logs t.py", tmp_path)
    start(made_plan, None, silently)
    assert (tmp_path / "logs" / "night").readlink() == paths_of(made_plan).machines
    assert started


def test_a_dry_run_names_every_command_and_writes_nothing(
    started: list[Path], tmp_path: Path
) -> None:
    text = "\n".join(described(made("--local-machines 2 --standbys 1 t.py --lr 1", tmp_path)))
    assert "2 and 1 spare stand-in machines x 1 ranks = 2 ranks" in text
    assert "everstep.controller" in text
    assert "3 stand-in machines, m0 to m2" in text
    assert "ranks: python t.py --lr 1" in text
    joins = "\n".join(described(made("--nnodes 2 --node-rank 1 t.py", tmp_path)))
    assert "everstep.controller" not in joins
    assert "everstep.keeper" in joins
    assert not started
    assert not (tmp_path / "state").exists()
