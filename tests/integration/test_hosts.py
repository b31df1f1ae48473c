"""Several hosts, played by several calls of `everstep run` on this one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import Everstep, everstep_in, left_of, status_of, wait_until


@pytest.fixture
def everstep(tmp_path: Path) -> Iterator[Everstep]:
    with everstep_in(tmp_path) as command:
        yield command


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def flags(port: int, position: int) -> tuple[str, ...]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
    return ("run", "--nnodes", "2", "--node-rank", str(position), endpoint, "--no-fork")


def test_two_hosts_train_one_job(everstep: Everstep) -> None:
    script = everstep.script("print(os.environ['GROUP_RANK'], 'of', os.environ['WORLD_SIZE'])")
    port = free_port()
    second = everstep.popen(*flags(port, 1), "--nproc-per-node", "2", script)
    first = everstep.popen(*flags(port, 0), "--nproc-per-node", "2", script)
    shown = [viewer.communicate(timeout=60) for viewer in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), shown
    for position, (out, err) in enumerate(shown):
        ranks = (2 * position, 2 * position + 1)
        assert sorted(out.splitlines()) == [f"[rank{r}]: {position} of 4" for r in ranks], err
        assert "finished: " in err
    job = everstep.job(f"script-{port}")
    assert sorted(entry.name[-2:] for entry in job.machines.iterdir()) == ["-0", "-1"]
    assert not left_of(job)


def test_hosts_that_share_no_directory_join_by_the_token_of_the_environment(
    everstep: Everstep, tmp_path: Path
) -> None:
    script = everstep.script(
        "print(rank, os.environ.get('EVERSTEP_TOKEN'), __file__)\n"
        "assert os.environ['EVERSTEP_CODE_VERSION']"
    )
    port = free_port()
    everstep.environ["EVERSTEP_TOKEN"] = "a-secret-of-this-test"
    first = everstep.popen(*flags(port, 0), script)
    elsewhere = tmp_path / "elsewhere"
    with everstep_in(elsewhere.parent) as other:
        other.state = elsewhere
        other.environ |= {
            "EVERSTEP_HOME": str(elsewhere),
            "EVERSTEP_TOKEN": "a-secret-of-this-test",
        }
        second = other.popen(*flags(port, 1), script)
        out, err = second.communicate(timeout=60)
        assert second.returncode == 0, err
        # Its code is the job's first version, which it runs where the user has it.
        assert out.splitlines() == [f"[rank1]: 1 None {script}"]
        assert first.wait(60) == 0
        first.communicate()
        name = f"script-{port}"
        assert not left_of(other.job(name))
        assert not left_of(everstep.job(name))


def test_a_wrong_token_is_one_sentence(everstep: Everstep, tmp_path: Path) -> None:
    script = everstep.script("wait_for('never')")
    port = free_port()
    everstep("run", "--detach", *flags(port, 0)[1:], script)
    wait_until(lambda: status_of(everstep.job(f"script-{port}")), "a controller")
    everstep.environ["EVERSTEP_TOKEN"] = "another-secret"
    everstep.environ["EVERSTEP_HOME"] = str(tmp_path / "elsewhere")
    done = everstep(*flags(port, 1), "--rdzv-conf", "join_timeout=0", script)
    assert done.code == 2
    assert "refuses our token: set EVERSTEP_TOKEN to the same value" in done.err
    assert "Traceback" not in done.err
