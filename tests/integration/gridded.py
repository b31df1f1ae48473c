"""The script of test_layouts.py: four ranks on a 2x2 mesh, which each generation tells otherwise.

The first gives everstep no mesh, so that only process groups show what there is. The second gives
it. The third gives one with the names of its dimensions turned, which its process groups deny.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import everstep

STEPS_MAX = 100_000
"""The test ends the job long before."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    args = parser.parse_args()
    generation = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    run = everstep.attach()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
    if generation == 2:
        everstep.attach(mesh=mesh)
    if generation >= 3:
        everstep.attach(mesh=_turned(mesh))
    for _ in run.steps(stop=STEPS_MAX):
        asked = torch.tensor(float(args.stop.exists()))
        dist.all_reduce(asked)
        if asked.item() > 0:
            break
    dist.destroy_process_group()


def _turned(mesh: dist.device_mesh.DeviceMesh) -> dist.device_mesh.DeviceMesh:
    """Of the same ranks, without process groups of its own."""
    names = ("tp", "dp")
    return dist.device_mesh.DeviceMesh("cpu", mesh.mesh, mesh_dim_names=names, _init_backend=False)


if __name__ == "__main__":
    main()
