"""The examples as a user first runs them: under plain python, with and without a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ("--steps", "6", "--layers", "1", "--width", "16", "--seq", "8", "--batch", "1")
pytestmark = pytest.mark.torch


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    outside = {name: value for name, value in os.environ.items() if "EVERSTEP" not in name}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *arguments],
        env=outside | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=110)  # on a busy machine torch takes its time
    assert process.returncode == 0
    return output


def test_the_gpt_example_gives_the_same_bits_twice_outside_everstep(tmp_path: Path) -> None:
    runs = [
        start(
            "gpt/train.py",
            *TINY,
            *("--loss-log", str(tmp_path / f"losses-{number}")),
            *("--digest", str(tmp_path / f"digest-{number}")),
        )
        for number in (1, 2)
    ]
    for run in runs:
        assert "step 5: loss" in finish(run)
    losses = [(tmp_path / f"losses-{number}").read_text() for number in (1, 2)]
    assert losses[0] == losses[1]
    assert [line.split()[0] for line in losses[0].splitlines()] == list("012345")
    digests = [(tmp_path / f"digest-{number}").read_text() for number in (1, 2)]
    assert digests[0] == digests[1]
    assert len(bytes.fromhex(digests[0])) == 32


def test_the_plain_example_goes_on_from_its_own_checkpoint_after_a_kill(tmp_path: Path) -> None:
    checkpoint = tmp_path / "plain.pt"
    flags = ("--checkpoint", str(checkpoint), "--every", "2")
    killed = start("plain/train.py", *flags, "--steps", "1000000")
    deadline = time.monotonic() + 60
    while not checkpoint.exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = finish(start("plain/train.py", *flags, "--steps", "0"))
    begins = int(again.split("starts at step ")[1].split()[0])
    assert begins > 0
    assert begins % 2 == 0
