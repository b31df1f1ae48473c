"""`everstep check` with the real checks, for Slurm, as a node service: what docs/checks.md says."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.checks import registry
from everstep.agent.checks.metrics import Seen, exposition
from everstep.commands.check_choice import FOR_A_JOB, chosen, read_limits
from tests.commands.odd_host import DEADLINE_S, ROOT, Host, wait_until
from tests.house.documents import blocks

CHECKS = frozenset(registry.CHECKS) - FOR_A_JOB
"""The real ones that make sense alone: the fixture `host` replaces them."""


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


def test_a_dry_run_says_that_nothing_would_happen(host: Host, slurm: Slurm) -> None:
    code, out = host.check("--only", "odd.growth", "--drain", "--dry-run")
    assert code == 0
    assert "note: Nothing here would drain this node." in out
    assert slurm.calls == []


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
    # A process that has changed its user may not be looked into, by that user either.
    stacks = [each["do"] for each in told["unseen"] if each["checks"] == ["stacks of ranks"]]
    assert len(stacks) == (os.geteuid() == 0)
    assert all("kernel.yama.ptrace_scope=1" in do for do in stacks)


def test_what_accuses_others_than_the_job_is_asked_only_by_its_name() -> None:
    assert {check.name for check in chosen([], {})} == CHECKS
    assert FOR_A_JOB.isdisjoint(check.name for check in chosen(["gpu"], {}))
    assert {check.name for check in chosen(["gpu.memory_left"], {})} == {"gpu.memory_left"}


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
    ours = [each for each in blocks() if each.place.startswith("docs/checks.md:")]
    (block,) = [each for each in ours if each.mark.endswith(f"::{test}")]
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


@pytest.mark.parametrize("code", [0, 1, 2, 3, 126, 127, 130, 137])
def test_a_prolog_fails_for_a_broken_machine_alone(tmp_path: Path, code: int) -> None:
    stub(tmp_path, "everstep", f'echo "$@"; exit {code}')
    done = run_line(on_the_page("test_a_prolog_fails_for_a_broken_machine_alone"), tmp_path)
    assert (done.returncode != 0) is (code == 2)
    assert done.stdout.startswith("check --drain ")


def test_a_health_program_drains_and_logs(tmp_path: Path) -> None:
    stub(tmp_path, "everstep", 'echo "$@"')
    stub(tmp_path, "logger", 'echo "$@:"; cat')
    done = run_line(on_the_page("test_a_health_program_drains_and_logs"), tmp_path)
    assert done.stdout.startswith("-t everstep:\ncheck --drain ")


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_node_is_resumed_by_hand(tmp_path: Path, code: int) -> None:
    stub(tmp_path, "everstep", f"exit {code}")
    stub(tmp_path, "scontrol", 'echo "$@"')
    done = run_line(on_the_page("test_a_node_is_resumed_by_hand"), tmp_path)
    assert done.stdout == ("" if code else "update NodeName=node-07 State=RESUME\n")


def stub(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_metrics_on_the_page_exist() -> None:
    seen = Seen(0.0, [], [], {}, {}, {})
    families = set(re.findall(r"^# TYPE (\w+)", exposition(seen), re.MULTILINE))
    assert families >= set(re.findall(r"\beverstep_check\w*", PAGE.read_text()))


# --- the node service ----------------------------------------------------------------------------


@pytest.fixture
def node_socket(host: Host) -> Iterator[Path]:
    """Of a node service as the page runs it."""
    path = host.root / "node.sock"
    line = on_the_page("test_a_node_service_is_run_by_the_command")
    words = line.replace("/run/everstep/node.sock", str(path)).split()
    assert words[0] == "everstep"
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: path.exists() or process.poll() is not None)
        yield path
    finally:
        process.terminate()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert not path.exists()


def test_a_node_service_is_run_by_the_command(node_socket: Path) -> None:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(DEADLINE_S)
        asked.connect(str(node_socket))
        assert asked.recv(1) == b"{"


def test_an_ordinary_user_sees_the_kernel_log_by_the_node_service(
    host: Host, node_socket: Path
) -> None:
    flags = ["--json", "--only", "kernel.xid", "--root", "/"]
    for socket_path, may in ((host.root / "nobody", False), (node_socket, True)):
        _, out = host.as_nobody(*flags, "--socket", str(socket_path), module="everstep.cli")
        told = json.loads(out)
        assert bool(told["results"]) is may
        assert bool(told["unseen"]) is not may


def test_a_node_service_of_a_group_that_is_none_says_so(
    host: Host,
) -> None:
    where = ["--serve", "--root", "/", "--socket", str(host.root / "s")]
    code, out = host.check(*where, "--group", "no such group")
    assert code == 2
    right = "there is no group 'no such group'"
    assert (right if os.geteuid() == 0 else "run the node service as root") in out
