"""`everstep agent`: what the machine that joins is told of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.commands import foreground
from everstep.files import read_json, write_atomically
from everstep.model import CheckpointSpec, JobId, JobSpec
from everstep.paths import Endpoint, JobPaths, MachineSetup


def test_a_machine_that_joins_knows_its_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobPaths(tmp_path, JobId("j"))
    job.root.mkdir(parents=True)
    spec = JobSpec(
        job=JobId("j"),
        uid="0123abcd",
        command=("train.py",),
        working_dir=str(tmp_path),
        nnodes=1,
        nproc_per_node=1,
        checkpoint=CheckpointSpec(directory=str(tmp_path)),
    )
    write_atomically(job.spec, spec)
    write_atomically(job.endpoint, Endpoint(url="http://127.0.0.1:1", term=1, pid=1))
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "spine.leaf7.node1")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    started: list[list[str]] = []

    def execv(path: str, words: list[str]) -> None:
        assert path == words[0]
        started.append(words)

    monkeypatch.setattr(os, "execv", execv)
    foreground.agent(job, node_rank=0, local_addr=None)
    assert len(started) == 1
    (file,) = tmp_path.rglob("machine.json")
    assert read_json(file, MachineSetup).units == ("switch:leaf7",)
