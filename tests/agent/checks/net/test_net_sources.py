"""Sources of interfaces, routes and TCP on trees of files: what is read, and what is not there."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Collection

import msgspec
import pytest

from everstep.agent.checks.check import Here, Limits, NotReadable
from everstep.agent.checks.net import CHECKS, SOURCES
from everstep.agent.checks.net.asking import Heard, Target, ask
from everstep.agent.checks.net.interfaces import COUNT_EVERY, RARELY, InterfacesSource
from everstep.agent.checks.net.link import LinkCheck
from everstep.agent.checks.net.reach import ASKED_AGAIN, Answer, Reach, ReachSource
from everstep.agent.checks.net.routes import Route, default_routes
from everstep.agent.checks.net.tcp import TcpSource
from tests.agent.checks.net.judging import judge, said
from tests.agent.checks.net.trees import as_ordinary_user, interface, routes, write


def test_every_check_has_its_source_and_says_what_it_is_about() -> None:
    sources = {source.name for source in SOURCES}
    assert {check.source for check in CHECKS} == sources
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.about for check in CHECKS)
    assert {source.every_s for source in SOURCES if source.name in {"net", "infiniband"}} == {1.0}


def test_a_machine_without_the_files_has_no_such_signal(here: Here) -> None:
    assert all(source().absent(here) for source in SOURCES)


# --- interfaces ----------------------------------------------------------------------------------


def test_physical_interfaces_and_those_with_a_default_route_are_read(here: Here) -> None:
    interface(here, "eth0", driver="mlx5_core", rdma="mlx5_0", statistics__x=1)
    interface(here, "br0", operstate="down", carrier=0)
    interface(here, "veth1a2b")
    interface(here, "lo")
    write(here.path("/sys/class/net"), {"bonding_masters": "bond0"})
    routes(here, "eth0 010200C0 0003", "br0 010200C0 0003")
    sample = InterfacesSource().sample(here)
    assert set(sample.interfaces) == {"eth0", "br0"}
    assert sample.used == ("eth0",), "a route of an interface that never was up is a left-over"
    eth0 = sample.interfaces["eth0"]
    assert (eth0.up, eth0.physical, eth0.driver, eth0.rdma) == (
        True,
        True,
        "mlx5_core",
        ("mlx5_0",),
    )
    assert (eth0.speed_mbps, eth0.mtu, eth0.counts["rx_errors"]) == (100000, 9000, 0)
    assert "no carrier (operstate down)" in sample.interfaces["br0"].why
    assert msgspec.json.decode(msgspec.json.encode(sample), type=type(sample)) == sample


def test_named_interfaces_are_those_that_the_job_uses(here: Here) -> None:
    interface(here, "eth0", driver="virtio_net")
    interface(here, "lo")
    routes(here, "eth0 010200C0 0003")
    named = msgspec.structs.replace(here, interfaces=("lo", "eth9"))
    sample = InterfacesSource().sample(named)
    assert sample.used == ("lo", "eth9")
    assert set(sample.interfaces) == {"eth0", "lo"}


def test_an_interface_that_lost_its_route_is_still_used(here: Here) -> None:
    interface(here, "eth0")
    routes(here, "eth0 010200C0 0003")
    source = InterfacesSource()
    source.sample(here)
    routes(here)
    assert {source.sample(here).used for _ in range(RARELY + 1)} == {("eth0",)}


def test_a_source_that_begins_anew_does_not_make_a_link_well(here: Here) -> None:
    path = interface(here, "eth0", driver="ixgbe")
    routes(here, "eth0 010200C0 0003")
    samples = [InterfacesSource().sample(here)]
    write(path, {"carrier": 0, "operstate": "down", "carrier_changes": 3})
    routes(here)
    anew = InterfacesSource()
    samples += [anew.sample(here), anew.sample(here)]
    assert said(judge(LinkCheck(Limits()), samples)) == {"eth0": "warn+"}


def test_an_ordinary_user_reads_the_interfaces_of_this_machine() -> None:
    with as_ordinary_user():
        sample = InterfacesSource().sample(Here(interfaces=("lo",)))
    assert sample.interfaces["lo"].up is not None
    assert sample.interfaces["lo"].counts["rx_packets"] >= 0


def test_a_bond_is_of_the_cards_below_it(here: Here) -> None:
    interface(here, "eth0", driver="mlx5_core", rdma="mlx5_bond_0")
    bond = interface(here, "bond0")
    vlan = interface(here, "bond0.7")
    (bond / "lower_eth0").symlink_to("../eth0")
    (vlan / "lower_bond0").symlink_to("../bond0")
    (bond / "lower_bond0.7").symlink_to("../bond0.7")  # a circle, which no kernel makes
    routes(here, "bond0 010200C0 0003", "bond0.7 010200C0 0003")
    sample = InterfacesSource().sample(here)
    assert set(sample.interfaces["bond0"].rdma) == {"mlx5_bond_0"}
    assert set(sample.interfaces["bond0.7"].rdma) == {"mlx5_bond_0"}


def test_what_hardly_changes_is_read_rarely_and_a_change_is_seen_at_once(here: Here) -> None:
    path = interface(here, "eth0", driver="ixgbe")
    source = InterfacesSource()
    source.sample(here)
    write(path, {"statistics/rx_errors": 7, "mtu": 1500, "speed": 1000})
    looks = [source.sample(here).interfaces["eth0"] for _ in range(RARELY)]
    assert [look.counts["rx_errors"] for look in looks].index(7) == COUNT_EVERY - 1
    assert [look.mtu for look in looks].index(1500) == RARELY - 1
    assert looks[-1].speed_mbps == 1000
    write(path, {"carrier_changes": 4, "speed": 100})
    look = source.sample(here).interfaces["eth0"]
    assert (look.changes, look.speed_mbps) == (4, 100)


def test_packets_are_counted_when_the_link_changes(here: Here) -> None:
    """What was lost around a change is else found half a minute later, and counts once more."""
    eth0 = interface(here, "eth0", driver="mlx5_core")
    source = InterfacesSource()
    assert source.sample(here).interfaces["eth0"].changed_s is None
    write(eth0, {"carrier_changes": 4, "statistics/rx_errors": 300})
    flapped = source.sample(here).interfaces["eth0"]
    assert flapped.counts["rx_errors"] == 300
    assert flapped.changed_s == 0
    later = source.sample(here).interfaces["eth0"]
    assert later.changed_s is not None
    assert later.changed_s > 0


def test_a_link_is_down_before_operstate_says_so(here: Here) -> None:
    path = interface(here, "eth0", driver="ixgbe")
    source = InterfacesSource()
    source.sample(here)
    write(path, {"carrier": 0, "carrier_changes": 3})
    assert source.sample(here).interfaces["eth0"].up is False


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"carrier": "x" * 50, "operstate": "?"}, "its carrier reads"),
        ({"carrier": "", "operstate": "\x00\xff"}, "reads"),
        ({"carrier": 1, "operstate": "notpresent"}, "does not answer"),
    ],
)
def test_garbage_is_no_link_that_is_down(here: Here, files: dict[str, object], why: str) -> None:
    path = interface(here, "eth0", driver="ixgbe", speed=-1, mtu="many", carrier_changes="")
    write(path, files)
    look = InterfacesSource().sample(here).interfaces["eth0"]
    assert why in look.why
    assert look.up is (False if "answer" in why else None)
    assert (look.speed_mbps, look.mtu, look.changes) == (None, None, None)


def test_files_that_vanish_or_are_forbidden_are_not_read(here: Here) -> None:
    path = interface(here, "eth0", driver="ixgbe", operstate="down")
    write(here.path("/sys/class/net"), {"bonding_masters": "bond0"})
    routes(here, "eth0 010200C0 0003")
    source = InterfacesSource()
    first = source.sample(here)
    (path / "carrier").chmod(0)
    with as_ordinary_user():
        denied = source.sample(here)
    assert "Permission denied" in denied.interfaces["eth0"].why
    shutil.rmtree(path)
    path.mkdir()
    torn = source.sample(here)
    assert "No such file" in torn.interfaces["eth0"].why
    path.rmdir()
    gone = source.sample(here)
    check = LinkCheck(Limits())
    assert said(judge(check, [first, denied])) == {"eth0": "error"}
    assert said(judge(check, [first, torn])) == {"eth0": "error"}
    assert said(judge(check, [first, gone])) == {"eth0": "evict"}
    shutil.rmtree(here.path("/sys/class/net"))
    with pytest.raises(FileNotFoundError):
        source.sample(here)


# --- routes --------------------------------------------------------------------------------------


def test_default_routes_of_both_families(here: Here) -> None:
    routes(
        here,
        "eth0 010200C0 0003",
        "eth1 00000000 0001",
        "eth2 010200C0 0002",
        "x y z",
        "eth3 0 0201",
        "tun0 0 0001 80",
    )
    zero, net = "0" * 32, "fe80" + "0" * 28
    rows = [
        f"{zero} 00 {zero} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eth0",
        f"{zero} 00 {zero} 00 fd77{'0' * 27}1 00000400 00000001 00000000 00000003     eth1",
        f"{zero} 00 {zero} 00 {zero} 00000400 00000001 00000000 00000001     tun0",
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo",
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00000201       lo",
        f"{net} 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001     eth0",
        "torn",
        "",
    ]
    write(here.path("/proc/net"), {"ipv6_route": "\n".join(rows)})
    assert default_routes(here) == (
        Route(interface="eth0", gateway="192.0.2.1"),
        Route(interface="eth1"),
        Route(interface="eth0", gateway="fe80::1%eth0"),
        Route(interface="eth1", gateway="fd77::1"),
        Route(interface="tun0"),
    )


# --- tcp -----------------------------------------------------------------------------------------

SNMP = """Tcp: RtoMax MaxConn OutSegs RetransSegs
Tcp: 120000 -1 500 7
Udp: InDatagrams
Udp: 3"""


def test_counters_of_tcp_and_of_tracked_connections(here: Here) -> None:
    write(here.path("/proc/net"), {"snmp": SNMP, "netstat": "TcpExt: A TCPTimeouts\nTcpExt: 1 2"})
    source = TcpSource()
    assert not source.absent(here)
    sample = source.sample(here)
    assert sample.counts == {"OutSegs": 500, "RetransSegs": 7, "TCPTimeouts": 2}
    assert sample.tracked is None
    netfilter = {"nf_conntrack_count": 5, "nf_conntrack_max": 100}
    write(here.path("/proc/sys/net/netfilter"), netfilter)
    sample = source.sample(here)
    assert (sample.tracked, sample.tracked_most) == (5, 100)


@pytest.mark.parametrize(
    "text", ["", "Tcp: OutSegs", "Tcp: OutSegs\nUdp: 5", "Tcp: OutSegs\nTcp: x"]
)
def test_torn_tables_are_not_readable(here: Here, text: str) -> None:
    write(here.path("/proc/net"), {"snmp": text})
    with pytest.raises(NotReadable):
        TcpSource().sample(here)


def test_this_machine_has_counters_of_tcp() -> None:
    assert TcpSource().sample(Here()).counts["OutSegs"] >= 0


# --- reach ---------------------------------------------------------------------------------------


def test_a_refusal_and_an_acceptance_are_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        open_, closed = Target(address="127.0.0.1", port=port), Target(address="127.0.0.1", port=1)
        six, host = Target(address="::1", port=1), Target(address="127.0.0.1")
        heard = ask([open_, closed, six, host], 5.0)
    assert {each: heard[each].answered for each in (open_, closed, six, host)} == {
        open_: True,
        closed: True,
        six: True,
        host: True,
    }


def test_an_address_nobody_can_ask_is_not_one_that_does_not_answer() -> None:
    target = Target(address="fe80::1%nosuchif0", port=7)
    assert ask([target], 0.1)[target].answered is None


def test_names_without_an_address_are_not_asked(here: Here) -> None:
    asked = msgspec.structs.replace(here, addresses=("127.0.0.1:1", ":bad", "[::1]:x"))
    source = ReachSource()
    assert not source.absent(asked)
    sample = source.sample(asked)
    assert {name: each.answered for name, each in sample.answers.items()} == {
        "127.0.0.1:1": True,
        ":bad": None,
        "[::1]:x": None,
    }
    assert msgspec.json.decode(msgspec.json.encode(sample), type=Reach) == sample


def test_one_answer_of_an_address_that_ignores_everybody_is_none_to_be_missed(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True, True, False])

    def hear(targets: Collection[Target], within_s: float) -> dict[Target, Heard]:
        del within_s
        return {each: Heard(answered=next(answers), why="so it is") for each in targets}

    monkeypatch.setattr("everstep.agent.checks.net.reach.ask", hear)
    sample = ReachSource().sample(msgspec.structs.replace(here, addresses=("10.0.0.1:7",)))
    assert sample.answers == {"10.0.0.1:7": Answer(answered=False, why="so it is", misses=1)}
    assert not list(answers), "it was asked until it was silent"


def test_who_answers_is_asked_again_after_half_a_minute(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        asked = msgspec.structs.replace(here, addresses=(f"127.0.0.1:{server.getsockname()[1]}",))
        source = ReachSource()
        source.sample(asked)
        for _ in range(1 + ASKED_AGAIN):
            server.accept()[0].close()
        for _ in range(3):
            sample = source.sample(asked)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert next(iter(sample.answers.values())).answered
