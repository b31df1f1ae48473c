"""A child process that takes samples of one source when told to, as the agent's children do.

Started by the tests of the GPU sources; a process of its own, since the loader reads
LD_LIBRARY_PATH only once.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from everstep.agent.checks.check import Here, NotReadable
from everstep.agent.checks.gpu import SOURCES
from everstep.model import Value
from tests.agent.checks.gpu.fake import FakeNvml

ANSWER_S = 30.0


class Asking:
    """One source in a child of its own."""

    def __init__(
        self, name: str, fake: FakeNvml, root: Path | None = None, gpus: tuple[str, ...] = ()
    ) -> None:
        self.source = next(source for source in SOURCES if source.name == name)
        here = Here(root=str(root or fake.machine()), gpus=gpus)
        argv = [sys.executable, "-m", "tests.agent.checks.gpu.asking", name]
        self.process = subprocess.Popen(
            [*argv, msgspec.json.encode(here).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **fake.env},
            cwd=Path(__file__).parents[4],
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self) -> None:
        """Begin a sample."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def answer(self, within_s: float = ANSWER_S) -> Any:
        """The sample that was begun; NotReadable as the source raised it, TimeoutError."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], within_s)[0]:
            raise TimeoutError
        answer = stdout.readline()
        if answer.startswith(b"!"):
            raise NotReadable(answer[1:].decode().strip())
        return msgspec.json.decode(answer, type=self.source.kind)

    def sample(self) -> Any:
        """One sample."""
        self.ask()
        return self.answer()


def main() -> None:
    """What the child does: one sample for each line."""
    name, here = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Here)
    source = next(source for source in SOURCES if source.name == name)()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for _ in sys.stdin:
        try:
            sample: Value = source.sample(here)
        except (NotReadable, OSError, ValueError) as error:
            print(f"!{error!r}")
        else:
            print(msgspec.json.encode(sample).decode())


if __name__ == "__main__":
    main()
