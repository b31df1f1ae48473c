"""`everstep run` for real: every process, every signal, nothing left behind.

Ranks are plain Python in fresh interpreters (--no-fork): what is tested here does not need torch,
and a warm launcher costs seconds for each machine. Training is tested elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.commands import jobs
from everstep.processes import everyone, read_pid_file, send_signal, wait_gone
from tests.integration.command import (
    Everstep,
    everstep_in,
    left_of,
    processes_of,
    runs,
    status_of,
    wait_until,
)

TWO_BY_TWO = ("--local-machines", "2", "--nproc-per-node", "2", "--no-fork", "--job", "j")


@pytest.fixture
def everstep(tmp_path: Path) -> Iterator[Everstep]:
    with everstep_in(tmp_path) as command:
        yield command


def ranks_run(everstep: Everstep, count: int = 4) -> bool:
    return all(everstep.starts(rank) for rank in range(count))


def test_a_script_runs_to_its_end(everstep: Everstep) -> None:
    script = everstep.script(
        "print('hello from', rank, sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['ROLE_NAME'])"
    )
    done = everstep("run", *TWO_BY_TWO, "--role", "worker", script, "--lr", "3")
    assert done.code == 0, done.err
    lines = sorted(done.out.splitlines())
    assert lines == [f"[rank{r}]: hello from {r} ['--lr', '3'] 4 worker" for r in range(4)]
    assert "job j finished: " in done.err
    assert not left_of(everstep.job("j"))


def test_a_script_that_raises_at_import_is_reported_with_its_traceback_and_not_retried(
    everstep: Everstep,
) -> None:
    script = everstep.script("import no_such_module_at_all")
    done = everstep("run", *TWO_BY_TWO, script)
    assert done.code != 0
    assert "ModuleNotFoundError: No module named 'no_such_module_at_all'" in done.err
    assert f'File "{script}"' in done.err
    assert "job j failed: " in done.err
    assert max(everstep.starts(rank) for rank in range(4)) <= 2
    assert not left_of(everstep.job("j"))


def test_a_rank_that_ends_early_alone_ends_the_job_with_a_reason(everstep: Everstep) -> None:
    script = everstep.script(
        """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 0:
    (here / "new").write_text(str(os.getpid()))
    (here / "new").rename(here / f"pid-{attempt}")
    sys.exit(0)
wait_for(f"pid-{attempt}")
pid = (here / f"pid-{attempt}").read_text()
while pathlib.Path("/proc", pid).exists():
    time.sleep(0.02)
raise RuntimeError("Connection closed by peer")
"""
    )
    done = everstep("run", *TWO_BY_TWO, script)
    assert done.code != 0
    print(done.err)
    assert "rank 0 ended with exit code 0 while other ranks still trained" in done.err
    assert not left_of(everstep.job("j"))


def test_a_detached_job_is_attached_to_asked_about_and_stopped(everstep: Everstep) -> None:
    script = everstep.script("print('up', flush=True); wait_for('never')")
    started = everstep("run", *TWO_BY_TWO, "--detach", "--json", script)
    assert json.loads(started.out)["job"] == "j"
    job = everstep.job("j")
    wait_until(lambda: runs(job), "a running job")
    assert [m["condition"] for m in everstep.json("status", "j")["machines"]] == ["member"] * 2

    viewer = everstep.popen("attach")
    everstep("inject", "kill-rank", "--rank", "3")
    wait_until(lambda: everstep.starts(3) == 2, "a second start of rank 3")
    wait_until(lambda: (status := status_of(job)) and status.incidents, "an incident")
    (incident,) = everstep.json("incidents")["incidents"]
    story = everstep.json("why", incident["incident"])
    assert {"RankExited", "BeginGeneration"} <= {line["name"] for line in story}
    assert "RankExited" in everstep("why", incident["incident"]).out

    assert everstep("stop").code == 0
    out, err = viewer.communicate(timeout=60)
    assert "[rank0]: up" in out
    assert "opened: " in err
    assert "job j stopped: " in err
    assert viewer.returncode == everstep("attach", "j").code
    assert everstep.json("status")["outcome"]["outcome"] == "stopped"
    assert "ETTR" in everstep("incidents").out
    assert not left_of(job)


def test_ctrl_c_stops_the_job_and_leaves_nothing(everstep: Everstep) -> None:
    script = everstep.script("wait_for('never')")
    viewer = everstep.popen("run", *TWO_BY_TWO, script)
    wait_until(lambda: ranks_run(everstep), "four ranks")
    viewer.send_signal(signal.SIGINT)
    _, err = viewer.communicate(timeout=60)
    assert "stopping the job" in err
    assert "job j stopped: " in err
    assert viewer.returncode != 0
    assert not left_of(everstep.job("j"))


def test_after_kill_9_of_everything_clean_leaves_nothing(everstep: Everstep) -> None:
    script = everstep.script("wait_for('never')")
    everstep("run", *TWO_BY_TWO, "--detach", script)
    wait_until(lambda: ranks_run(everstep), "four ranks")
    job = everstep.job("j")
    wanted = everstep("clean", "j", "--dry-run").out
    assert wanted.count("would end process") >= 11, wanted
    ours = {int(line.split()[0]) for line in processes_of(job)}
    for process in everyone():
        if process.pid in ours:
            send_signal(process, signal.SIGKILL)
    cleaned = everstep("clean", "j")
    assert cleaned.code == 0, cleaned.err
    assert not left_of(job)
    assert everstep("clean", "j").out == "job j: nothing was left\n"
    assert jobs.spec_of(job).job == "j"


def test_a_controller_and_a_machine_are_brought_by_hand(everstep: Everstep) -> None:
    script = everstep.script("wait_for('go')")
    everstep("run", *TWO_BY_TWO, "--detach", script)
    job = everstep.job("j")
    wait_until(lambda: runs(job), "a running job")
    refused = everstep("controller", "j", "--resume")
    assert refused.code == 2
    assert "Job j has a keeper already" in refused.err
    for pid_file in (job.keeper_pid, job.controller_pid):
        process = read_pid_file(pid_file)
        assert process is not None
        send_signal(process, signal.SIGKILL)
        wait_gone([process], 10.0)
    assert "say --resume" in everstep("controller", "j").err

    keeper = everstep.popen("controller", "j", "--resume")
    wait_until(lambda: (status := status_of(job)) and status.term == 2, "the next term")
    spare = everstep.popen("agent", "j")
    wait_until(lambda: runs(job, machines=3), "one more machine")
    status = status_of(job)
    assert status is not None
    assert status.generation == 1
    (script.parent / "go").touch()
    assert everstep("attach", "j").code == 0
    for foreground in (keeper, spare):
        foreground.communicate(timeout=60)
        assert foreground.returncode == 0
    assert [everstep.starts(rank) for rank in range(4)] == [1, 1, 1, 1]
    assert not left_of(job)


def test_a_lost_terminal_ends_the_viewer_and_nothing_else(everstep: Everstep) -> None:
    script = everstep.script("wait_for('go'); print('done', rank)")
    terminal, inner = pty.openpty()
    viewer = everstep.popen(
        *("run", *TWO_BY_TWO, script),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=lambda: _take_terminal(inner),
    )
    os.close(inner)
    wait_until(lambda: ranks_run(everstep), "four ranks")
    os.close(terminal)
    assert viewer.wait(60) != 0
    job = everstep.job("j")
    assert len(processes_of(job)) >= 11
    (script.parent / "go").touch()
    wait_until(lambda: jobs.result_of(job) is not None, "a result")
    assert everstep("attach", "j").code == 0
    assert not left_of(job)


def _take_terminal(inner: int) -> None:
    fcntl.ioctl(inner, termios.TIOCSCTTY, 0)


def test_a_reader_that_goes_away_ends_the_viewer_and_nothing_else(everstep: Everstep) -> None:
    script = everstep.script("print('line', flush=True); wait_for('go'); print('x', flush=True)")
    viewer = everstep.popen("run", *TWO_BY_TWO, script, stderr=subprocess.DEVNULL)
    assert viewer.stdout is not None
    assert viewer.stdout.readline().startswith("[rank")
    viewer.stdout.close()
    (script.parent / "go").touch()
    assert viewer.wait(60) == 129
    job = everstep.job("j")
    wait_until(lambda: jobs.result_of(job) is not None, "a result")
    assert everstep("attach", "j").code == 0
