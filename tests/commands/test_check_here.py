"""`everstep check` with the real checks, for Slurm, as a node service: what docs/checks.md says."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.checks import registry
from everstep.commands.check_choice import read_limits
from tests.commands.odd_host import DEADLINE_S, ROOT, Host, wait_until
from tests.house.documents import blocks

CHECKS = frozenset(registry.CHECKS)
"""The real ones: the fixture `host` replaces them."""


# --- Slurm ---------------------------------------------------------------------------------------

STUB = """#!/bin/sh
printf '%s\\n' "$*" >> '{log}'
[ "$1" = update ] && exit {update}
printf '%s\\n' 'NodeName=n7 Arch=x86_64 State={state} ThreadsPerCore=1 {reason}'
exit {show}
"""


class Slurm:
    """A scontrol that writes down how it was called."""

    def __init__(self, host: Host) -> None:
        self._file = host.bin / "scontrol"
        self._log = host.root / "scontrol.log"

    def answers(
        self, state: str = "IDLE", reason: str = "", *, show: int = 0, update: int = 0
    ) -> None:
        text = STUB.format(log=self._log, state=state, reason=reason, show=show, update=update)
        self._file.write_text(text)
        self._file.chmod(0o755)
        self._log.unlink(missing_ok=True)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def slurm(host: Host) -> Slurm:
    """On a host that should get no work."""
    host.says("counter", 0)
    host.check("--only", "odd.growth")
    made = Slurm(host)
    made.answers()
    return made


def drained(host: Host, *flags: str, **environ: str) -> tuple[int, str]:
    value = int((host.root / "counter").read_text())
    host.says("counter", value + 1000)
    return host.check("--only", "odd.growth", "--drain", *flags, **environ)


REASON = "Reason=everstep: odd.growth: it grew by 1000, more than 5 | 'quoted'"


def test_a_node_that_should_get_no_work_is_drained(host: Host, slurm: Slurm) -> None:
    code, out = drained(host, SLURMD_NODENAME="n7")
    assert code == 2
    assert slurm.calls == [
        "--oneliner show node n7",
        f"update NodeName=n7 State=DRAIN {REASON}".replace("|", "/"),
    ]
    assert "note: Slurm node n7 is drained" in out


def test_without_slurms_variable_the_node_is_called_as_the_host(host: Host, slurm: Slurm) -> None:
    drained(host, SLURMD_NODENAME="")
    name = socket.gethostname().partition(".")[0]
    assert slurm.calls[1].startswith(f"update NodeName={name} State=DRAIN ")


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "DRAINED", "MIXED+DRAIN+NOT_RESPONDING"])
def test_a_node_that_somebody_drained_keeps_its_reason(
    host: Host, slurm: Slurm, state: str
) -> None:
    slurm.answers(state, "Reason=bad fan, ask Kim [root@2026-01-01T10:00:00]")
    code, out = drained(host, SLURMD_NODENAME="n7")
    assert code == 2
    assert slurm.calls == ["--oneliner show node n7"]
    assert "drained already, reason 'bad fan, ask Kim [root@2026-01-01T10:00:00]'" in out


def test_a_dry_run_shows_the_command(host: Host, slurm: Slurm) -> None:
    code, out = drained(host, "--dry-run", SLURMD_NODENAME="n7")
    assert code == 2
    assert slurm.calls == ["--oneliner show node n7"]
    assert "note: Without --dry-run: scontrol update NodeName=n7 State=DRAIN 'Reason=" in out


def test_a_scontrol_that_fails_is_said_and_the_node_stays_critical(
    host: Host, slurm: Slurm
) -> None:
    slurm.answers(update=1)
    code, out = drained(host, SLURMD_NODENAME="n7")
    assert code == 2
    assert "note: Slurm node n7 is not drained: scontrol ended with 1" in out


def test_a_host_without_slurm_is_told_so(host: Host) -> None:
    host.says("counter", 0)
    host.check("--only", "odd.growth")
    code, out = drained(host, SLURMD_NODENAME="n7", PATH=str(host.bin))
    assert code == 2
    assert "is not drained: there is no scontrol on PATH" in out


def test_a_node_that_is_only_suspect_is_not_drained(host: Host, slurm: Slurm) -> None:
    host.says("counter", 50)
    code, _ = host.check("--only", "odd.growth", "--drain", SLURMD_NODENAME="n7")
    assert code == 1
    assert slurm.calls == []


# --- all real checks, on this machine ------------------------------------------------------------


def test_as_nobody_every_check_says_something(host: Host) -> None:
    host.state.mkdir()
    host.state.chmod(0o777)
    code, out = host.as_nobody("--json", "--root", "/", module="everstep.cli")
    told = json.loads(out)
    assert told["exit_code"] == code
    assert says_something(told) >= CHECKS


def says_something(told: dict[str, Any]) -> set[str]:
    """Names of the checks that an answer has a word about."""
    assert re.match(r"EVERSTEP (OK|WARNING|CRITICAL|UNKNOWN) - ", told["summary"])
    assert not [each for each in told["results"] if "defective" in each["why"]]
    groups = [*told["absent"], *told["unseen"]]
    named = {check for group in groups for check in group["checks"]}
    return named | set(told["silent"]) | {each["check"] for each in told["results"]}


# --- what docs/checks.md says --------------------------------------------------------------------

PAGE = ROOT / "docs" / "checks.md"


def on_the_page(test: str) -> str:
    """The commands that this test tests."""
    (block,) = [each for each in blocks() if each.mark.endswith(f"::{test}")]
    return block.commands


def run_line(line: str, directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(directory),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(limits_on_the_page())
    for line in on_the_page("test_commands_of_the_page").splitlines():
        done = run_line(line, tmp_path)
        assert done.returncode in (0, 1, 2, 3), done.stderr
        assert done.stderr == ""
        assert not done.stdout.startswith("EVERSTEP UNKNOWN - -"), f"a wrong flag in {line}"
        assert done.stdout.startswith(("EVERSTEP ", "{", "check "))
        if "--json" in line:
            said = says_something(json.loads(done.stdout))
            assert said >= CHECKS - {"host.load"}, "which the page turns off"


def limits_on_the_page() -> str:
    (toml,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert isinstance(toml, str)
    return toml


def test_the_limits_on_the_page_are_right(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(limits_on_the_page())
    assert set(read_limits(file)) < CHECKS


@pytest.mark.parametrize(("code", "passes"), [(0, True), (1, True), (2, False), (3, True)])
def test_a_prolog_lets_warnings_pass(tmp_path: Path, code: int, passes: bool) -> None:
    everstep = tmp_path / "everstep"
    everstep.write_text(f"#!/bin/sh\nexit {code}\n")
    everstep.chmod(0o755)
    done = run_line(on_the_page("test_a_prolog_lets_warnings_pass"), tmp_path)
    assert (done.returncode == 0) is passes


# --- the node service ----------------------------------------------------------------------------


def test_a_node_service_is_run_by_the_command(tmp_path: Path) -> None:
    socket_path = tmp_path / "node.sock"
    line = on_the_page("test_a_node_service_is_run_by_the_command")
    words = line.replace("/run/everstep/node.sock", str(socket_path)).split()
    assert words[0] == "everstep"
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: socket_path.exists() or process.poll() is not None)
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(DEADLINE_S)
            asked.connect(str(socket_path))
            assert asked.recv(1) == b"{"
    finally:
        process.terminate()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert not socket_path.exists()


def test_a_node_service_of_a_group_that_is_none_says_so(
    host: Host,
) -> None:
    where = ["--serve", "--root", "/", "--socket", str(host.root / "s")]
    code, out = host.check(*where, "--group", "no such group")
    assert code == 2
    right = "there is no group 'no such group'"
    assert (right if os.geteuid() == 0 else "run the node service as root") in out
