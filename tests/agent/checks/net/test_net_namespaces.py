"""Links that are cut, flap, lose packets and vanish, gateways that fall silent: on real ones."""

from __future__ import annotations

from everstep.agent.checks.check import Here, Limits
from everstep.agent.checks.net.errors import ErrorsCheck, ErrorsLimits
from everstep.agent.checks.net.interfaces import RARELY, Interfaces
from everstep.agent.checks.net.link import LinkCheck
from everstep.agent.checks.net.mtu import MtuCheck
from everstep.agent.checks.net.reach import Reach
from everstep.agent.checks.net.retransmits import RetransmitsCheck, RetransmitsLimits
from everstep.agent.checks.net.switch import SwitchCheck, SwitchLimits
from everstep.agent.checks.net.tcp import Tcp
from tests.agent.checks.net.judging import judge, said
from tests.agent.checks.net.netns import FAR, GATEWAY, GATEWAY6, Namespace, Network

LINK = LinkCheck(Limits())
SWITCH = SwitchCheck(SwitchLimits())
CALM = SwitchCheck(SwitchLimits(settle_s=0.0))


def test_a_link_that_is_cut_outside_comes_back_and_flaps(network: Network) -> None:
    samples = [network.host.sample("net", Interfaces)]
    assert samples[0].used == ("eth0",)
    assert said(judge(LINK, samples)) == {"eth0": "info"}
    network.cut()
    samples.append(network.host.sample("net", Interfaces))
    results = judge(LINK, samples)
    assert said(results) == {"eth0": "warn+"}
    assert "no carrier" in results[0].why
    network.mend()
    samples.append(network.host.sample("net", Interfaces))
    assert said(judge(LINK, samples)) == {"eth0": "info"}
    network.cut()
    network.mend()
    samples.append(network.host.sample("net", Interfaces))
    results = judge(LINK, samples)
    assert said(results) == {"eth0": "warn+"}
    assert "lost its link once" in results[0].why
    samples.append(network.host.sample("net", Interfaces))
    assert said(judge(LINK, samples)) == {"eth0": "info"}


def test_an_interface_that_is_set_down_lost_its_routes_and_is_still_the_jobs(
    network: Network,
) -> None:
    samples = [network.host.sample("net", Interfaces)]
    network.host.ip("link", "set", "eth0", "down")
    samples += [network.host.sample("net", Interfaces) for _ in range(RARELY + 1)]
    results = judge(LINK, samples)
    assert said(results) == {"eth0": "warn+"}
    assert "it is set down" in results[0].why


def test_an_interface_that_is_deleted_is_a_card_that_crashed(network: Network) -> None:
    network.plug(network.host, "port1", "eth1")
    named = Here(interfaces=("eth0", "eth1"))
    samples = [network.host.sample("net", Interfaces, named)]
    network.host.ip("link", "del", "eth1")
    samples.append(network.host.sample("net", Interfaces, named))
    assert said(judge(LINK, samples, here=named)) == {"eth0": "info", "eth1": "evict"}


def test_packets_that_are_lost_and_an_mtu_that_changed(network: Network) -> None:
    """A veth drops, and counts, what its other end would not take."""
    host = network.host
    check = ErrorsCheck(ErrorsLimits())
    samples = [host.sample("net", Interfaces)]
    host.order("datagrams", to=(GATEWAY, 9), count=200, size=1000)
    samples += [host.sample("net", Interfaces) for _ in range(5)]
    assert said(judge(check, samples)) == {"eth0": "info"}
    assert judge(check, samples)[0].values["lost_packets"] == 0
    network.switch.ip("link", "set", "port", "mtu", "600")
    host.order("datagrams", to=(GATEWAY, 9), count=40, size=1000)
    samples += [host.sample("net", Interfaces) for _ in range(5)]
    results = judge(check, samples)
    assert said(results) == {"eth0": "warn"}, "no wire lost them"
    assert results[0].values["lost_packets"] == 40
    host.ip("link", "set", "eth0", "mtu", "1280")
    samples += [host.sample("net", Interfaces) for _ in range(RARELY)]
    assert said(judge(MtuCheck(Limits()), samples)) == {"eth0": "suspect"}


def test_segments_that_are_lost_on_the_way_are_sent_again(network: Network) -> None:
    """A slow port of the switch, with room for a few packets, drops most of a burst."""
    check = RetransmitsCheck(RetransmitsLimits(segments_min=50))
    with Namespace("evf") as far:
        network.plug(far, "port1", "eth0")
        far.ip("addr", "add", f"{FAR}/24", "dev", "eth0")
        port = far.order("serve", int, to=(FAR, 0))
        samples = [network.host.sample("net.tcp", Tcp)]
        network.host.order("stream", to=(FAR, port), count=10, size=100_000)
        samples.append(network.host.sample("net.tcp", Tcp))
        assert said(judge(check, samples, every_s=10)) == {"": "info"}
        network.switch.tc("qdisc add dev port1 root tbf rate 20mbit burst 10kb limit 20kb")
        network.host.order("stream", to=(FAR, port), count=10, size=100_000)
        samples.append(network.host.sample("net.tcp", Tcp))
        results = judge(check, samples[1:], every_s=10)
    assert said(results) == {"": "warn"}
    assert results[0].values["tcp_retransmits"] > 0


def test_a_gateway_is_asked_by_tcp_where_nobody_may_ping(network: Network) -> None:
    """The link stays, and the switch forwards nothing."""
    host = network.host
    here = Here(addresses=(f"{GATEWAY}:8", f"[{GATEWAY6}]:8"))
    samples = [host.sample("net.reach", Reach, here)]
    assert {name: each.answered for name, each in samples[0].answers.items()} == {
        GATEWAY: True,
        GATEWAY6: True,
        f"{GATEWAY}:8": True,
        f"[{GATEWAY6}]:8": True,
    }
    assert said(judge(SWITCH, samples)) == {"": "info"}
    network.switch.ip("link", "set", "port", "nomaster")
    new = Here(addresses=(f"{GATEWAY}:9",))
    samples.append(host.sample("net.reach", Reach, new))
    assert samples[-1].answers[f"{GATEWAY}:9"].misses == 1
    assert samples[-1].answers[GATEWAY].answered, "it was asked just before"
    host.order("forget_when", name="net.reach")
    samples.append(host.sample("net.reach", Reach, here))
    assert said(judge(SWITCH, samples)) == {"": "info"}
    samples.append(host.sample("net.reach", Reach, here))
    results = judge(SWITCH, samples)
    assert said(results) == {"": "warn+"}
    assert results[0].cause == f"gateway {GATEWAY}"


def test_two_pings_without_an_answer_are_an_alert_unless_the_link_is_the_cause(
    network: Network,
) -> None:
    host = network.host
    host.set("net/ipv4/ping_group_range", "0 2147483647")
    host.ip("-6", "route", "del", "default")
    network.switch.ip("rule", "add", "pref", "10", "ipproto", "tcp", "blackhole")  # no refusals
    samples = [host.sample("net.reach", Reach)]
    while not samples[-1].answers[GATEWAY].ever:  # on a busy machine an answer may come too late
        host.order("forget_when", name="net.reach")
        samples.append(host.sample("net.reach", Reach))
    network.switch.ip("link", "set", "port", "nomaster")
    host.order("forget_when", name="net.reach")
    samples.append(host.sample("net.reach", Reach))
    assert samples[-1].answers[GATEWAY].misses == 1
    assert said(judge(SWITCH, samples)) == {"": "info"}
    samples.append(host.sample("net.reach", Reach))
    assert said(judge(SWITCH, samples)) == {"": "warn+"}
    network.switch.ip("link", "set", "port", "master", "br0")
    while samples[-1].answers[GATEWAY].misses:
        samples.append(host.sample("net.reach", Reach))
    assert said(judge(SWITCH, samples)) == {"": "info"}
    network.cut()
    samples.append(host.sample("net.reach", Reach))
    assert samples[-1].down == ("eth0",)
    assert said(judge(SWITCH, samples)) == {"": "error"}, "that is net.link's event"
    network.mend()
    samples.append(host.sample("net.reach", Reach))
    assert samples[-1].changed_ago_s is not None
    assert said(judge(SWITCH, samples)) == {"": "error"}, "a port of a switch may need its time"
    assert said(judge(CALM, samples)) == {"": "info"}
