"""What run.py says where there is no GPU: here, or on any machine that hides its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_without_a_device_it_says_so_and_claims_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run.py"), "--report", report],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("No CUDA device: ")
    assert done.stdout.endswith(" Nothing was checked.\n")
    assert not report.exists()
