"""A directory that stands for a host, with the checks of odd_checks.py: for `everstep check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep import cli
from everstep.agent.checks import registry
from tests.commands import odd_checks

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
AS_NOBODY = """
import os, sys, io, contextlib
from {module} import main
argv = sys.argv
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    sys.argv = [*argv, "--state", argv[-1] + ".first"]  # the interpreter may be closed to nobody:
    main()  # so everything is imported before
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.argv = argv
main()
"""


class Host:
    """A directory that stands for a host, and the command on it."""

    def __init__(
        self, root: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.root = root
        self.state = root / "state"
        self.bin = root / "bin"
        self.bin.mkdir()
        for directory in (root, self.bin):
            directory.chmod(0o755)
        self._patch = patch
        self._capsys = capsys
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
        patch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        patch.setattr("everstep.agent.checks.looking.BETWEEN_S", 0.0)
        for there in (registry.SOURCES, registry.CHECKS):
            for name in list(there):
                patch.delitem(there, name)
        odd_checks.add(patch.setitem)

    def says(self, name: str, value: object) -> Path:
        file = self.root / name
        file.write_text(f"{value}")
        return file

    def check(self, *flags: str, **environ: str) -> tuple[int, str]:
        """Exit code and output of a call in this process."""
        self._patch.setattr(sys, "argv", ["everstep", "check", *flags, *self._places(flags)])
        with self._patch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return int(ended.value.code), out + err

    def told(self, *flags: str) -> dict[str, Any]:
        """The answer in JSON."""
        code, out = self.check("--json", *flags)
        answer: dict[str, Any] = json.loads(out)
        assert answer["exit_code"] == code
        return answer

    def start(self, *flags: str, code: str = "", **environ: str) -> subprocess.Popen[str]:
        """A process of its own."""
        code = code or "from tests.commands.odd_checks import main; main()"
        # Whoever starts the tests in a shell's background has SIGINT ignored for all of them.
        heeding = ["env", "--default-signal=INT"]
        return subprocess.Popen(
            [*heeding, sys.executable, "-c", code, "check", *flags, *self._places(flags)],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def as_nobody(self, *flags: str, module: str = "tests.commands.odd_checks") -> tuple[int, str]:
        process = self.start(*flags, code=AS_NOBODY.format(module=module))
        out, err = process.communicate(timeout=DEADLINE_S)
        assert "Traceback" not in err, err
        return process.returncode, out + err

    def _places(self, flags: tuple[str, ...]) -> list[str]:
        if {"--list", "--help"} & set(flags):
            return []
        root = [] if "--root" in flags else ["--root", str(self.root)]
        return root if "--state" in flags else [*root, "--state", str(self.state)]


def left(host: Host) -> list[str]:
    """Processes that took samples of this host and have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "everstep.agent.checks.child" in words and str(host.state) in words:
            found.append(process.name)
    return found


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
