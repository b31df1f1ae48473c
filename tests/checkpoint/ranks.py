"""Real ranks of torch.distributed over gloo, forked in a tenth of a second.

One process imports torch once, and forks as many ranks as a test asks for (the fixture `ranks` in
conftest.py starts it). What a rank runs is a function of a test module, found by its name; what it
asserts is reported by its traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Longer than any scenario on a loaded machine; a hang fails by pytest's own timeout else."""


class Ranks:
    """The test's end of the process that forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.ranks"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, world_size: int, work: Callable[..., None], *arguments: str | int | Path) -> None:
        """Run `work(*arguments)` on every rank of a new process group; raise what any raises."""
        failures = self.failures(world_size, work, *arguments)
        assert not failures, "\n".join(failures)

    def failures(
        self, world_size: int, work: Callable[..., None], *arguments: str | int | Path
    ) -> list[str]:
        """The same for ranks that may end by an exception or a signal: a text for each that did."""
        texts = [str(each) if isinstance(each, Path) else each for each in arguments]
        file = Path(inspect.getfile(work)).relative_to(ROOT)
        order = [world_size, ".".join(file.with_suffix("").parts), work.__name__, texts]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks ranks has died"
        failures: list[str] = json.loads(answer)
        return failures

    def close(self) -> None:
        """Also after a test that ran out of patience: then its ranks hang, and are killed."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.returncode == 0


def serve() -> None:
    """Take orders from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    # Once, for all ranks. The first optimizer would import torch._dynamo in each of them.
    for name in ("distributed.checkpoint", "distributed.fsdp", "distributed.tensor", "_dynamo"):
        importlib.import_module(f"torch.{name}")
    for line in sys.stdin:
        world_size, module, name, arguments = json.loads(line)
        work = getattr(importlib.import_module(module), name)
        answers.write(json.dumps(_all_ranks(world_size, work, arguments)) + "\n")
        answers.flush()


def _all_ranks(world_size: int, work: Callable[..., None], arguments: list[Any]) -> list[str]:
    place = Path(tempfile.mkdtemp(prefix="everstep-ranks-"))
    pids = []
    for rank in range(world_size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any thread
            pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = _one_rank(place, rank, world_size, lambda: work(*arguments))
            os._exit(code)
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    failures = [path.read_text() for path in sorted(place.glob("failure-*"))]
    failures += [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code > 1]
    shutil.rmtree(place)
    return failures


def _one_rank(place: Path, rank: int, world_size: int, work: Callable[[], None]) -> int:
    import datetime as dt  # noqa: PLC0415

    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=dt.timedelta(seconds=PATIENCE_S),
    )
    try:
        work()
        if dist.is_initialized():  # a script ends it itself
            dist.barrier()  # and the process ends as it is: see the end of examples/gpt/train.py
    except BaseException:  # noqa: BLE001 -- the outermost of a rank: the test shows it
        (place / f"failure-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    return 0


if __name__ == "__main__":
    serve()
