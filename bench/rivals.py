"""Rivals that benchmarks run beside everstep, installed apart from the project's venv.

Used by bench/restart.py, bench/checkpoint.py and bench/hang.py. A rival's packages go below
bench/.rivals/ without their dependencies on torch, so that everything measured uses the same torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).resolve().parent / ".rivals"


class Rival(NamedTuple):
    """One package of PyPI."""

    wanted: str
    needs: tuple[str, ...]
    """What it imports besides torch and numpy."""


NVRX = Rival("nvidia-resiliency-ext==0.4.1", ("defusedxml", "nvidia-ml-py", "pynvml", "pyyaml"))
DLROVER = Rival(
    "dlrover==0.6.1",
    (
        *("certifi", "charset-normalizer", "deprecated", "grpcio", "idna", "nvidia-ml-py"),
        *("packaging", "protobuf", "psutil", "pynvml", "requests", "urllib3", "wrapt"),
        # Its master imports these, on one host too.
        *("durationpy", "kubernetes", "oauthlib", "python-dateutil", "pyyaml"),
        *("requests-oauthlib", "six", "websocket-client"),
    ),
)
LM_RESILIENCY = Rival("lm-resiliency==0.2.0", ())


class RivalMissing(Exception):
    """The rival is not here; the message is the reason to print beside its empty figure."""


def installed(rival: Rival) -> Path:
    """The directory to put on PYTHONPATH for this rival, which is installed if need be.

    RivalMissing if it cannot be.
    """
    directory = HOME / rival.wanted.replace("==", "-")
    whole, packages = directory / "whole", " ".join((rival.wanted, *rival.needs))
    if whole.exists() and whole.read_text() == packages:
        return directory
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    command += ["--target", str(directory), rival.wanted, *rival.needs]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RivalMissing(f"pip cannot install {rival.wanted}: {' '.join(last)}")
    whole.write_text(packages)
    return directory
