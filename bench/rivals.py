"""Other launchers that benchmarks run beside everstep, installed apart from the project's venv.

Used by bench/restart.py. A rival's packages go below bench/.rivals/ without their dependencies on
torch, so that every launcher measured starts the same torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent / ".rivals"
NVRX = "nvidia-resiliency-ext==0.4.1"
NVRX_NEEDS = ("defusedxml", "nvidia-ml-py", "pynvml", "pyyaml")


class RivalMissing(Exception):
    """The rival is not here; the message is the reason to print beside its empty figure."""


def nvrx() -> Path:
    """The directory to put on PYTHONPATH for NVIDIA's launcher, which is installed if need be.

    RivalMissing if it cannot be.
    """
    directory = HOME / NVRX.replace("==", "-")
    if (directory / "nvidia_resiliency_ext").is_dir():
        return directory
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(directory), NVRX, *NVRX_NEEDS]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RivalMissing(f"pip cannot install {NVRX}: {' '.join(last)}")
    return directory
