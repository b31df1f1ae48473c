"""`everstep clean`: everything of the job is ended and removed, and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from everstep.cluster.cleanup import ERROR_FILE, clean_job, clean_machine
from everstep.cluster.local import LocalCluster
from everstep.files import FileUnreadable
from everstep.model import Generation, JobSpec, MachineId, Rank
from everstep.paths import JobPaths, shm_dir
from everstep.processes import alive, identify
from everstep.trainer.context import VARIABLE
from tests.cluster.support import (
    child_of,
    job,
    keeper_of,
    kill,
    make_job,
    runs,
    sleeping,
    wait_until,
)

M0, M1 = MachineId("m0"), MachineId("m1")
MAPS_ITS_ARGUMENT = """
import mmap, sys, time
file = open(sys.argv[1] + "/child", "r+b")
mapping = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(1000)
"""


def bring_up(spec: JobSpec, paths: JobPaths) -> None:
    """Two stand-ins, left running by a controller that is gone."""

    async def controller() -> None:
        cluster = LocalCluster(spec, paths, sleeping)
        cluster.watch(lambda _: None)
        cluster.first().send()

    asyncio.run(controller())
    for machine in (M0, M1):
        wait_until("it runs", partial(runs, spec, paths, machine))


def test_every_process_segment_and_socket_of_the_job_goes_and_a_second_time_finds_nothing(
    tmp_path: Path,
) -> None:
    with job(tmp_path) as (spec, paths):
        bring_up(spec, paths)
        children = [child_of(spec, m) for m in (M0, M1)]
        paths.machine(M0).launcher_socket.write_text("")
        paths.endpoint.write_text("{}")
        cleaned = clean_job(paths.root)
        assert not any(child and alive(child) for child in children)
        assert not shm_dir(spec.job, spec.uid, M0).exists()
        assert not paths.machine(M0).launcher_socket.exists()
        assert not paths.endpoint.exists()
        assert sum("everstep.keeper" in line for line in cleaned.processes) == 2
        assert "2 directories of copies" in str(cleaned)
        assert str(clean_job(paths.root)) == "nothing was left"
        assert paths.spec.exists(), "the job's records stay"


def test_what_a_killed_keeper_left_behind_is_found_by_environment_and_shared_memory(
    tmp_path: Path,
) -> None:
    with job(tmp_path) as (spec, paths):
        bring_up(spec, paths)
        child = child_of(spec, M0)
        assert child is not None
        mapper = subprocess.Popen(
            [
                *(sys.executable, "-S", "-c"),
                MAPS_ITS_ARGUMENT,
                str(shm_dir(spec.job, spec.uid, M0)),
            ],
            stdout=subprocess.PIPE,
            env={},
        )
        assert mapper.stdout is not None
        assert mapper.stdout.readline() == b"mapped\n"
        error_file = str(paths.machine(M0).error_file(Generation(1), Rank(0)))
        started_by_rank = subprocess.Popen(
            ["sleep", "1000"], env={**os.environ, ERROR_FILE: error_file}
        )
        kill(keeper_of(paths, M0))
        clean_machine(paths.machine(M0), spec, M0)
        assert not alive(child)
        assert started_by_rank.wait() == -9
        assert mapper.wait() == -9
        mapper.stdout.close()
        assert child_of(spec, M1) is not None, "the other machine is left alone"


def test_a_person_who_reads_a_log_of_the_job_and_another_job_are_left_alone(
    tmp_path: Path,
) -> None:
    with job(tmp_path) as (spec, paths), job(tmp_path) as (other, other_paths):
        bring_up(other, other_paths)
        log = paths.root / "controller.log"
        log.write_text("")
        reader = subprocess.Popen(["tail", "-f", str(log)])
        similar = f'{{"shm":"{shm_dir(spec.job, spec.uid, M1)}0"}}'
        neighbour = subprocess.Popen(["sleep", "1000"], env={**os.environ, VARIABLE: similar})
        clean_machine(paths.machine(M1), spec, M1)
        assert neighbour.poll() is None, "m10 is not m1"
        neighbour.kill()
        neighbour.wait()
        clean_job(paths.root)
        assert reader.poll() is None
        reader.kill()
        reader.wait()
        assert child_of(other, M0) is not None


def test_a_process_that_took_over_an_old_pid_is_not_killed(tmp_path: Path) -> None:
    _, paths = make_job(tmp_path)
    me = identify(os.getpid())
    assert me is not None
    paths.machine(M0).root.mkdir(parents=True)
    paths.machine(M0).pid_file("keeper").write_text(f"{me.pid} {me.start_ticks}\n")
    clean_job(paths.root)
    assert not paths.machine(M0).pid_file("keeper").exists()


def test_the_directory_of_a_job_that_was_renamed_is_not_taken_for_that_of_its_successor(
    tmp_path: Path,
) -> None:
    spec, paths = make_job(tmp_path)
    aside = paths.root.rename(tmp_path / f"{spec.job}.1")
    paths.root.mkdir()
    paths.endpoint.write_text("the successor's")
    clean_job(aside)
    assert paths.endpoint.exists()


def test_a_directory_that_is_no_job_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable, match=r"cannot read .*spec\.json: No such file"):
        clean_job(tmp_path)
    (tmp_path / "spec.json").write_text("{]")
    with pytest.raises(FileUnreadable, match=r"spec\.json is not what it should be"):
        clean_job(tmp_path)
