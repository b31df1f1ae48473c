"""Everything that needs a GPU, in one go: for a person who has a machine with one NVIDIA GPU.

    python tests/gpu/run.py [--report gpu-report.json]

It needs this checkout, a torch with CUDA, and msgspec; no network and no rights. It takes less than
three minutes, says in a line for each check whether it passed, failed or could not be run, and
writes the same with figures as JSON. Without a CUDA device it says so and ends with code 2.

pytest does not collect this file: what a machine cannot do is no skipped test. test_no_device.py
runs it and expects the honest answer. `--rehearse` runs all of it on the CPU, to find out whether
the checks themselves work; the report then says that it tells nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKS = {
    "device": 30,
    "matrix": 40,
    "host_does_not_wait": 60,
    "kills": 90,
    "launcher_and_nccl": 60,
    "nvml": 20,
}
"""Name in checks.py -> seconds after which it counts as failed."""
TOTAL_S = 160.0
GRACE_S = 5.0
NO_DEVICE = 2


def why_no_device() -> str | None:
    """Asks the driver itself, so that not even torch is needed for the answer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"NVIDIA's driver is not here ({error})"
    count = ctypes.c_int(0)
    refused = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if refused:
        return f"NVIDIA's driver answers with error {refused}"
    return None if count.value else "NVIDIA's driver sees no device"


def run_check(name: str, device: str, within_s: float) -> dict[str, Any]:
    """In a process of its own: one that hangs or dies takes no other with it."""
    began = time.monotonic()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryDirectory(prefix="everstep-gpu-") as directory:
        answer, output = Path(directory) / "answer.json", Path(directory) / "output"
        argv = [sys.executable, "-m", "tests.gpu.checks", name, device, str(answer)]
        late = ""
        with output.open("w") as log:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                late = f"not done within {within_s:.0f} s"
                process.terminate()  # it ends what it has started in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
        ended = late or f"it ended with code {process.returncode} and said nothing"
        found: dict[str, Any] = {"outcome": "failed", "why": ended}
        if answer.exists():
            found = json.loads(answer.read_text())
            found["why"] = late or found["why"]
        if found["outcome"] == "failed":
            found["output"] = output.read_text(errors="replace").splitlines()[-60:]
    return {"check": name, **found, "took_s": round(time.monotonic() - began, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run what needs a GPU, and report on it.")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; proves no GPU works")
    args = parser.parse_args()
    why = None if args.rehearse else why_no_device()
    if why is not None:
        print(f"No CUDA device: {why}. Nothing was checked.")
        return NO_DEVICE
    device = "cpu" if args.rehearse else "cuda"
    began = time.monotonic()
    checks = []
    for name, within_s in CHECKS.items():
        left_s = began + TOTAL_S - time.monotonic()
        if left_s < 1:
            check = {"check": name, "outcome": "could not run", "why": "no time was left"}
        else:
            check = run_check(name, device, min(within_s, left_s))
        took = f" ({check['took_s']} s)" if "took_s" in check else ""
        print(f"{check['outcome']:>13}  {name}: {check['why']}{took}", flush=True)
        checks.append(check)
    report = {
        "about": "a rehearsal on the CPU: it tells nothing about GPUs" if args.rehearse else "GPU",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "took_s": round(time.monotonic() - began, 1),
        "checks": checks,
    }
    args.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"The report is in {args.report}.")
    return int(any(check["outcome"] == "failed" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
