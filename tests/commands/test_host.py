"""Facts about this host, looked at from outside: real sockets, real files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from everstep.commands.flags import parse
from everstep.commands.host import (
    address_towards,
    check_runnable,
    gpu_count,
    is_here,
    port_is_free,
    slurm_units,
)
from everstep.commands.plan import Address, HostFacts, Plan, plan
from everstep.model import UserError


def made(words: str, here: Path) -> Plan:
    facts = HostFacts(state_dir=str(here), working_dir=str(here), cpus=1, gpus=0, uid="0123abcd")
    return plan(parse(words.split()), facts)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("0", 1), ("0,2", 2), ("GPU-1,MIG-2", 2), ("-1", 0), ("1,-1,2", 1)],
)
def test_gpus_are_counted_without_asking_their_driver(
    visible: str | None, count: int, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(visible, tmp_path) == count


def test_addresses_of_this_host_are_known_from_others() -> None:
    assert is_here("localhost")
    assert is_here("127.0.0.77")
    assert is_here(socket.gethostname()) or not socket.gethostname()
    assert not is_here("192.0.2.1")  # reserved for documentation (RFC 5737)
    assert not is_here("no-such-host.invalid")


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = Address(host="127.0.0.1", port=listener.getsockname()[1])
        assert not port_is_free(taken)
    assert port_is_free(taken)
    assert port_is_free(Address(host="127.0.0.1", port=0))


def test_the_address_towards_a_host_is_the_one_it_would_see() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"no-such-host\.invalid cannot be resolved"):
        address_towards("no-such-host.invalid")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("missing.py", "There is no script "),
        ("--nproc-per-node 2 4 train.py", "There is no script "),
        ("--preload no_such_pkg there.py", "--preload no_such_pkg: there is no installed"),
    ],
)
def test_what_every_rank_would_die_of_is_said_at_once(
    words: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "there.py").touch()
    with pytest.raises(UserError) as raised:
        check_runnable(made(words, tmp_path))
    assert str(raised.value).startswith(sentence)


def test_a_script_is_looked_for_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    check_runnable(made("there.py", tmp_path))
    check_runnable(made(f"{tmp_path}/there.py", tmp_path))
    check_runnable(made("--no-python nothing-is-looked-for", tmp_path))
    check_runnable(made("-m a.module.of.the.user", tmp_path))


@pytest.mark.parametrize(
    ("address", "pattern", "units"),
    [
        ("spine.leaf1.node1", "switch.switch.node", ("switch:leaf1",)),
        ("b3.node1", "block.node", ("block:b3",)),
        ("s[0-1].leaf1.node1.cluster.org", "switch.switch.node", ("switch:leaf1",)),
        ("node1", "node", ()),
        ("node1", "switch.switch.node", ()),
        ("", "", ()),
        ("x", "", ()),
        ("a b.node1", "switch.node", ()),
    ],
)
def test_slurm_says_what_a_host_shares(address: str, pattern: str, units: tuple[str, ...]) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm_units(environ) == units
    assert slurm_units({}) == ()
