"""Check of the launcher's forks on a GPU: CUDA is new in each, and NCCL works in it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path

from everstep.agent.fork import ForkRequest, RankPlan
from everstep.model import Rank
from tests.agent.support import Job, ask_launcher, exit_status, wait_for
from tests.gpu.answers import Answer

SCRIPT = """
import json, sys, time
began = time.perf_counter()
import torch
import torch.distributed as dist
device = sys.argv[1]
found = {"initialized_at_start": torch.cuda.is_initialized()}
dist.init_process_group("nccl" if device == "cuda" else "gloo")
tensor = torch.arange(1 << 20, dtype=torch.float32, device=device)
dist.all_reduce(tensor)
found["last"] = float(tensor[-1])
found["backend"] = dist.get_backend()
found["seconds_to_first_all_reduce"] = time.perf_counter() - began
dist.destroy_process_group()
print(json.dumps(found))
"""


def launcher_and_nccl(device: str) -> Answer:
    """Three generations of one rank, one after the other, by one launcher."""
    found = []
    with tempfile.TemporaryDirectory(prefix="everstep-gpu-") as directory:
        job = Job(Path(directory), f"gpu{os.getpid()}")
        job.describe(["all_reduce.py"], nproc_per_node=1)
        job.script("all_reduce.py", SCRIPT)
        job.shm.mkdir(parents=True)
        job.start("launcher")
        try:
            for generation in (1, 2, 3):
                found.append(run_one(job, generation, device))
                opened = nvidia_files(job.pid("launcher"))
                assert not opened, f"the launcher has {opened} open"
        finally:
            job.stop()
    assert not any(each["initialized_at_start"] for each in found), found
    assert all(each["last"] == (1 << 20) - 1 for each in found), found
    last = found[-1]
    why = f"{last['backend']} {last['seconds_to_first_all_reduce']:.2f} s after the fork"
    return Answer(why, {"generations": found})


def run_one(job: Job, generation: int, device: str) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = job.machine.ranks / str(generation)
    place.mkdir(parents=True)
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    log = place / "0.log"
    request = ForkRequest(
        generation=generation,
        command=("all_reduce.py", device),
        module=False,
        no_python=False,
        no_fork=False,
        working_dir=str(job.work),
        heartbeat=str(job.shm / "heartbeat"),
        ranks=(RankPlan(rank=Rank(0), slot=0, env=env, log=str(log)),),
    )
    wait_for("the launcher", job.machine.launcher_socket.exists, within_s=45)
    began = time.perf_counter()
    reply = ask_launcher(job.machine.launcher_socket, request)
    assert not reply.problem, reply.problem
    forked_s = time.perf_counter() - began
    forked = reply.ranks[0]
    status = exit_status(job.machine.exits, forked.pid, forked.start_ticks)
    assert status == 0, log.read_text()
    found: dict[str, float] = json.loads(log.read_text().splitlines()[-1])
    return found | {"forked_s": forked_s}


def nvidia_files(pid: int) -> list[str]:
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(link for link in links if link.startswith("/dev/nvidia"))
