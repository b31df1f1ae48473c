"""Files of limits: how their tables may be written, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.agent.checks.registry import make_checks
from everstep.commands.check_choice import read_limits
from everstep.commands.flags import RunFlags
from everstep.commands.host import facts_of_this_host
from everstep.diagnosis.words import Verdict
from everstep.model import ChecksSpec, UserError

FILE = """
["net.link"]
at_most = "warn"

[gpu.temperature]
off = true

[ib.port]
ignore = ["mlx5_4", "mlx5_an*"]

[gpu.xid.verdicts]
94 = "evict"

[kernel.log]
off_rules = ["nic.power"]
verdicts = { "kernel.oops" = "evict" }
"""
WANTED = {
    "net.link": {"at_most": "warn"},
    "gpu.temperature": {"off": True},
    "gpu.xid": {"verdicts": {"94": "evict"}},
    "ib.port": {"ignore": ["mlx5_4", "mlx5_an*"]},
    "kernel.log": {"off_rules": ["nic.power"], "verdicts": {"kernel.oops": "evict"}},
}


def test_limits_are_read_however_their_tables_are_written(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(FILE)
    assert read_limits(file) == WANTED
    assert read_limits(None) == {}


def test_lists_and_tables_reach_the_checks_of_a_job(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(FILE)
    facts = facts_of_this_host(RunFlags(script="train.py", check_limits=str(file)), tmp_path, {})
    sent = msgspec.json.encode(ChecksSpec(limits=facts.check_limits))
    came = msgspec.json.decode(sent, type=ChecksSpec)
    made = {check.name: check for check in make_checks(came.limits)}
    assert "gpu.temperature" not in made
    assert made["ib.port"].limits.ignore == ("mlx5_4", "mlx5_an*")
    assert made["kernel.log"].limits.verdicts == {"kernel.oops": Verdict.EVICT}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[net.link\n", "is no TOML"),
        (b"\xff", "is no TOML"),
        ("at_most = 3\n", ": at_most stands outside of a table"),
        ("[net.link]\nmost = [1]\n", ": check net.link has no limit 'most'"),
        ("[net.link]\nat_most = 2020-01-01\n", ": limits of check net.link: "),
        ("[net]\nx = 1\n[net.link]\n", ": there is no check 'net'"),
    ],
)
def test_a_file_of_limits_that_is_none_is_refused_in_one_sentence(
    tmp_path: Path, content: str | bytes | None, reason: str
) -> None:
    file = tmp_path / "limits.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refused:
        read_limits(file)
    assert f"{file}" in str(refused.value)
    assert reason in str(refused.value)
