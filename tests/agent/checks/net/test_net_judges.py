"""Judges of interfaces, TCP and reachability: good, bad, reset, gone, unreadable."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from everstep.agent.checks.check import Here, Limits
from everstep.agent.checks.net.conntrack import ConntrackCheck, ConntrackLimits
from everstep.agent.checks.net.counters import growth, total
from everstep.agent.checks.net.errors import ErrorsCheck, ErrorsLimits
from everstep.agent.checks.net.interfaces import Interface, Interfaces, InterfacesSource
from everstep.agent.checks.net.link import LinkCheck
from everstep.agent.checks.net.mtu import MtuCheck
from everstep.agent.checks.net.peers import usual
from everstep.agent.checks.net.reach import Answer, Reach
from everstep.agent.checks.net.retransmits import RetransmitsCheck, RetransmitsLimits
from everstep.agent.checks.net.speed import SpeedCheck, SpeedLimits
from everstep.agent.checks.net.switch import SwitchCheck, SwitchLimits
from everstep.agent.checks.net.tcp import Tcp
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts
from tests.agent.checks.net.judging import judge, said

LINK = LinkCheck(Limits())
UP = Interface(up=True, changes=2, physical=True, driver="mlx5_core", speed_mbps=100000)
DOWN = Interface(up=False, why="it has no carrier", changes=3, physical=True)
DOWN_AGAIN = Interface(up=False, why="it has no carrier", changes=5, was_up=True)
AGAIN = Interface(up=True, changes=4, physical=True)


def seen(*used: str, **interfaces: Interface) -> Interfaces:
    return Interfaces(interfaces=interfaces, used=used or ("eth0",))


# --- counters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "grown"),
    [
        (5, 7, 2),
        (5, 5, 0),
        (7, 5, None),
        (2**32 - 1, 3, 4),
        (2**40, 3, None),
        (2**32 - 1, 2**31, None),
        (None, 5, None),
        (5, None, None),
    ],
)
def test_a_smaller_counter_was_reset_or_wrapped(
    old: int | None, new: int | None, grown: int | None
) -> None:
    assert growth(old, new) == grown


def test_a_reset_of_one_counter_is_one_of_all() -> None:
    assert total({"a": 1, "b": 1}, {"a": 2, "b": 3}, "ab") == 3
    assert total({"a": 1, "b": 4}, {"a": 2, "b": 3}, "ab") is None
    assert total({"a": 1}, {"b": 3}, "ab") is None


# --- net.link ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([UP], "info"),
        ([UP, UP], "info"),
        ([UP, DOWN], "warn+"),
        ([UP, DOWN, DOWN], "warn+"),
        ([DOWN], "warn"),  # named, perhaps as one of many, and never connected
        ([DOWN, UP, DOWN_AGAIN], "warn+"),
        ([UP, DOWN, AGAIN], "info"),  # coming back is not a second event
        ([UP, AGAIN], "warn+"),
        ([UP, AGAIN, AGAIN], "info"),
        ([UP, Interface(up=True, changes=0)], "info"),  # made anew: counters begin again
        ([UP, DOWN, Interface(up=True, changes=6)], "warn+"),  # and once more in between
        ([Interface(up=True), Interface(up=True)], "info"),
        ([UP, Interface(why="its carrier cannot be read: Permission denied")], "error"),
    ],
)
def test_a_link_that_breaks_is_one_alert(samples: list[Interface], verdict: str) -> None:
    assert said(judge(LINK, [seen(eth0=each) for each in samples])) == {"eth0": verdict}


def test_down_and_flapped_replace_each_other() -> None:
    down = judge(LINK, [seen(eth0=UP), seen(eth0=DOWN)])[0]
    flapped = judge(LINK, [seen(eth0=UP), seen(eth0=AGAIN)])[0]
    assert down.key == flapped.key
    assert down.category is flapped.category is Category.INFINIBAND_ERROR
    assert "eth0 is down: it has no carrier" in down.why
    assert "lost its link once" in flapped.why
    assert LINK.again_s <= 30


def test_a_card_that_is_gone_leaves_at_once() -> None:
    assert said(judge(LINK, [seen(eth0=UP), seen()])) == {"eth0": "evict"}
    veth = Interface(up=True, changes=2)
    assert said(judge(LINK, [seen(eth0=veth), seen()])) == {"eth0": "warn+"}
    named = Here(interfaces=("eth0",))
    assert said(judge(LINK, [seen(eth0=veth), seen()], here=named)) == {"eth0": "evict"}
    never = judge(LINK, [seen(), seen()], here=named)
    assert said(never) == {"eth0": "error"}, "a wrong name is nobody's broken card"


def test_what_the_job_does_not_use_is_only_told() -> None:
    results = judge(LINK, [seen(eth0=UP, eth1=UP), seen(eth0=UP, eth1=DOWN)])
    assert said(results) == {"eth0": "info", "eth1": "info"}
    assert "down; the job does not use it" in results[1].why


def test_a_port_of_rdma_is_judged_once() -> None:
    card = msgspec.structs.replace(DOWN, rdma=("mlx5_0",))
    results = judge(LINK, [seen(eth0=UP), seen(eth0=card)])
    assert said(results) == {"eth0": "info"}
    assert "judged by ib.port as mlx5_0" in results[0].why


def test_a_card_whose_ports_nobody_judges_is_judged_by_its_link() -> None:
    """The job talks over its front-end interface, and names other devices for RDMA."""
    others = Here(hcas=("mlx5_7",))
    for device, here in (("mlx5_0", others), ("mlx5_an0", Here())):
        card = msgspec.structs.replace(DOWN, rdma=(device,))
        results = judge(LINK, [seen(eth0=UP), seen(eth0=card)], here=here)
        assert said(results) == {"eth0": "warn+"}


def test_a_flap_while_nobody_could_look_is_no_second_event() -> None:
    samples = [seen(eth0=UP), seen(eth0=AGAIN)]
    assert said(judge(LINK, samples, every_s=35.0)) == {"eth0": "info"}
    assert said(judge(LINK, [seen(eth0=UP), seen(eth0=DOWN)], every_s=35.0)) == {"eth0": "warn+"}


def test_a_kernel_that_does_not_tell_is_a_finding() -> None:
    source = InterfacesSource()
    assert source.unanswered(10.0, 2) is None
    result = source.unanswered(31.0, 6)
    assert result is not None
    assert (result.verdict, result.counts) == (Verdict.SUSPECT, Counts.TWICE)
    assert "31 s" in result.why


# --- net.speed, net.mtu --------------------------------------------------------------------------


def test_what_is_usual_is_what_most_have() -> None:
    assert usual({"a": 1, "b": 1, "c": 2}) == 1
    assert usual({"a": 1, "b": 1, "c": 2, "d": 2}) is None
    assert usual({"a": 1, "b": 1}) is None


def at(mbps: int | None, driver: str = "mlx5_core", up: bool = True) -> Interface:
    return Interface(up=up, driver=driver, speed_mbps=mbps)


@pytest.mark.parametrize(
    ("first", "now", "verdicts"),
    [
        ([at(100)], [at(100)], {"e0": "info"}),
        ([at(100)], [at(40)], {"e0": "suspect"}),
        ([at(100)], [at(200)], {"e0": "info"}),
        ([at(100)], [at(None)], {}),
        ([at(100)], [at(10, up=False)], {}),
        ([at(None)], [at(100)], {"e0": "info"}),
        ([at(25)] * 2 + [at(10)], [at(25)] * 2 + [at(10)], {"e0": "info", "e2": "suspect"}),
        ([at(25), at(10)], [at(25), at(10)], {"e0": "info", "e1": "info"}),
        ([at(25)] * 3, [at(25)] * 2 + [at(10, "igb")], {"e0": "info", "e2": "suspect"}),
    ],
)
def test_slower_than_at_the_start_or_than_equal_cards(
    first: list[Interface], now: list[Interface], verdicts: dict[str, str]
) -> None:
    samples = [
        seen(*(f"e{n}" for n in range(len(each))), **{f"e{n}": i for n, i in enumerate(each)})
        for each in (first, now)
    ]
    found = said(judge(SpeedCheck(SpeedLimits()), samples))
    assert found.items() >= verdicts.items()
    assert bool(found) == bool(verdicts)


def test_a_speed_that_is_expected() -> None:
    check = SpeedCheck(SpeedLimits(expected_mbps=200))
    assert said(judge(check, [seen("e0", e0=at(100))])) == {"e0": "suspect"}
    assert said(judge(check, [seen("e0", e0=at(200))])) == {"e0": "info"}


def test_a_changed_mtu() -> None:
    big, small = Interface(up=True, mtu=9000), Interface(up=True, mtu=1500)
    check = MtuCheck(Limits())
    assert said(judge(check, [seen(eth0=big), seen(eth0=big)])) == {"eth0": "info"}
    result = judge(check, [seen(eth0=big), seen(eth0=small)])
    assert said(result) == {"eth0": "suspect"}
    assert "ip link set eth0 mtu 9000" in result[0].do
    assert not judge(check, [seen(eth0=big), seen(eth0=Interface(up=True))])
    assert not judge(check, [seen("eth1", eth0=big), seen("eth1", eth0=small)]), "not used"


# --- net.errors ----------------------------------------------------------------------------------


def counted(packets: int, lost: int = 0, changes: int = 2, **other: int) -> Interface:
    counts = {"rx_packets": packets // 2, "tx_packets": packets // 2, "tx_dropped": lost, **other}
    return Interface(up=True, changes=changes, counts=counts)


@pytest.mark.parametrize(
    ("first", "now", "verdict"),
    [
        (counted(0), counted(1_000_000, 50), "info"),
        (counted(0), counted(1_000_000, 300), "warn"),  # the host had no room for them
        (counted(0, rx_missed_errors=0), counted(10**6, rx_missed_errors=300), "warn"),
        (counted(0), counted(100, 29), "info"),  # too few to say anything
        (counted(0), counted(100, 31), "warn"),
        (counted(0), counted(0), "info"),
        (counted(0, 900), counted(1_000_000, 900), "info"),  # of old
        (counted(10**6, 900), counted(1000, 800), "info"),  # reset
        (counted(2**32 - 2), counted(2**32 + 10**6), "info"),
        (counted(0), counted(10**6, 300, changes=4), "info"),  # net.link tells that
        (counted(0), counted(10**6, rx_dropped=10**5), "info"),  # frames nobody wants
        (counted(0), counted(10**6, rx_missed_errors=300), "info"),  # first seen now
        (counted(0, rx_errors=0), counted(10**6, rx_errors=300), "warn+"),
        (counted(0, rx_errors=0), counted(10**6, 300, rx_errors=20), "warn"),
        (counted(0), Interface(up=True), "error"),
    ],
)
def test_loss_is_a_part_of_all_packets(first: Interface, now: Interface, verdict: str) -> None:
    samples = [seen(eth0=first), *[seen(eth0=now)] * 30]
    assert said(judge(ErrorsCheck(ErrorsLimits()), samples)) == {"eth0": verdict}


def test_loss_around_a_flap_belongs_to_it() -> None:
    """Else a flap that is tolerated once would count twice: when it is seen, and by its losses."""
    before = counted(0, rx_errors=0)
    flap = counted(10, changes=4, rx_errors=0)
    check = ErrorsCheck(ErrorsLimits())
    for after in range(3, 90):
        lost = counted(10**6, changes=4, rx_errors=300)
        since = [replace(lost, changed_s=float(second)) for second in range(3, after + 1)]
        samples = [before, replace(flap, changed_s=0.0), *since]
        assert said(judge(check, [seen(eth0=each) for each in samples])) == {"eth0": "info"}
    down = replace(counted(10**6, rx_errors=300), up=False)
    assert said(judge(check, [seen(eth0=before), seen(eth0=down)])) == {"eth0": "info"}


def test_loss_is_over_when_the_window_is() -> None:
    bad = counted(10**6, rx_errors=300)
    check = ErrorsCheck(ErrorsLimits())
    good = seen(eth0=counted(0, rx_errors=0))
    assert said(judge(check, [good, *[seen(eth0=bad)] * 30])) == {"eth0": "warn+"}
    assert said(judge(check, [seen(eth0=counted(0)), *[seen(eth0=bad)] * 32])) == {"eth0": "info"}
    assert not judge(check, [seen(), seen(eth0=bad)]), "the first look alarms nobody"


def test_loss_beside_rdma_is_no_strike() -> None:
    card = replace(counted(1000, rx_errors=300), rdma=("mlx5_0",))
    samples = [seen(eth0=counted(0, rx_errors=0)), seen(eth0=card)]
    assert said(judge(ErrorsCheck(ErrorsLimits()), samples)) == {"eth0": "warn"}


# --- net.tcp, net.conntrack ----------------------------------------------------------------------


def tcp(sent: int, again: int) -> Tcp:
    return Tcp(counts={"OutSegs": sent, "RetransSegs": again})


@pytest.mark.parametrize(
    ("first", "now", "verdict"),
    [
        (tcp(0, 0), tcp(100_000, 500), "info"),
        (tcp(0, 0), tcp(100_000, 1500), "warn"),
        (tcp(0, 0), tcp(900, 500), "info"),
        (tcp(10**6, 10**5), tcp(10**6, 10**5), "info"),
        (tcp(10**6, 10**5), tcp(5000, 500), "info"),
        (Tcp(counts={}), tcp(5000, 500), "info"),
    ],
)
def test_segments_sent_again(first: Tcp, now: Tcp, verdict: str) -> None:
    check = RetransmitsCheck(RetransmitsLimits())
    assert said(judge(check, [first, now], every_s=10.0)) == {"": verdict}


@pytest.mark.parametrize(
    ("tracked", "most", "verdicts"),
    [(10, 100, {"": "info"}), (95, 100, {"": "warn"}), (None, None, {}), (5, 0, {}), (5, None, {})],
)
def test_a_full_table_of_connections(
    tracked: int | None, most: int | None, verdicts: dict[str, str]
) -> None:
    sample = Tcp(counts={}, tracked=tracked, tracked_most=most)
    assert said(judge(ConntrackCheck(ConntrackLimits()), [sample])) == verdicts


# --- net.switch ----------------------------------------------------------------------------------

GOOD = Answer(gateway=True, answered=True, why="it answers", ever=True)
ONCE = Answer(gateway=True, answered=False, why="no answer", misses=1, ever=True)
TWICE = Answer(gateway=True, answered=False, why="no answer", misses=2, ever=True)
NEVER = Answer(gateway=True, answered=False, why="no answer", misses=9)
NAMED = Answer(answered=False, why="no answer", misses=2, ever=True)
NAMED_GOOD = Answer(answered=True, why="it answers", ever=True)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (Reach(answers={"gw": GOOD}), "info"),
        (Reach(answers={"gw": ONCE}), "info"),
        (Reach(answers={"gw": TWICE}), "warn+"),
        (Reach(answers={"gw": NEVER}), "error"),
        (Reach(answers={"gw": NEVER, "store": NAMED_GOOD}), "info"),
        (Reach(answers={"gw": TWICE, "store": NAMED_GOOD}), "warn"),
        (Reach(answers={"gw": GOOD, "store": NAMED}), "warn+"),
        (Reach(answers={"gw": TWICE, "store": NAMED}), "warn+"),
        (Reach(answers={"gw": TWICE}, down=("eth0",)), "error"),
        (Reach(answers={"gw": TWICE}, changed_ago_s=10.0), "error"),
        (Reach(answers={"gw": TWICE}, changed_ago_s=100.0), "warn+"),
        (Reach(answers={"gw": Answer(gateway=True, answered=None, why="too many files")}), "error"),
        (Reach(answers={}), "info"),
    ],
)
def test_two_misses_are_a_dead_switch_and_one_event(now: Reach, verdict: str) -> None:
    assert said(judge(SwitchCheck(SwitchLimits()), [now])) == {"": verdict}


def test_machines_behind_one_switch_name_it() -> None:
    check = SwitchCheck(SwitchLimits())
    result = judge(check, [Reach(answers={"store": NAMED, "10.0.0.1": TWICE})])[0]
    assert result.cause == "gateway 10.0.0.1"
    assert "10.0.0.1" in result.why
    result = judge(check, [Reach(answers={"gw": GOOD, "store": NAMED})])[0]
    assert result.cause == "address store"


def test_an_answer_before_the_agent_was_restarted_is_remembered() -> None:
    silent = Answer(gateway=True, answered=False, why="no answer", misses=2)
    samples = [Reach(answers={"gw": GOOD}), Reach(answers={"gw": silent})]
    assert said(judge(SwitchCheck(SwitchLimits()), samples)) == {"": "warn+"}
