"""Judges of RDMA devices and ports: good, bad, reset, full, gone, unreadable."""

from __future__ import annotations

import msgspec
import pytest

from everstep.agent.checks.check import Here
from everstep.agent.checks.net.ib_device import DeviceCheck
from everstep.agent.checks.net.ib_errors import PortErrorLimits, PortErrorsCheck
from everstep.agent.checks.net.ib_gid import GidCheck
from everstep.agent.checks.net.ib_port import PortCheck
from everstep.agent.checks.net.ib_rate import RateCheck, RateLimits
from everstep.agent.checks.net.ib_traffic import TrafficCheck, TrafficLimits
from everstep.agent.checks.net.ib_transport import TransportCheck, TransportLimits
from everstep.agent.checks.net.ignoring import PortLimits
from everstep.agent.checks.net.port_counters import AllPortCounters, PortCounters
from everstep.agent.checks.net.port_gids import Gids
from everstep.agent.checks.net.ports import Port, Ports, PortsSource
from everstep.diagnosis.words import Verdict
from everstep.health import Counts
from tests.agent.checks.net.judging import judge, said


def active(rate: float | None = 400.0, downed: int | None = 0, board: str = "x") -> Port:
    return Port(
        state="ACTIVE",
        physical="LinkUp",
        downed=downed,
        rate_gbps=rate,
        board=board,
        was_active=True,
    )


def other(state: str, physical: str = "Polling", downed: int = 1, was: bool = True) -> Port:
    return Port(state=state, physical=physical, downed=downed, was_active=was)


def ports(*every: Port, device: str = "mlx5_{}") -> Ports:
    named = {f"{device.format(number)}/1": each for number, each in enumerate(every)}
    devices = tuple(name.partition("/")[0] for name in named)
    met = {name.partition("/")[0]: each.was_active for name, each in named.items()}
    return Ports(ports=named, devices=devices, met=met)


# --- ib.port -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([active()], "info"),
        ([active(), active()], "info"),
        ([active(), other("DOWN")], "warn+"),
        ([active(), other("DOWN", "Disabled")], "warn+"),
        ([active(), other("INIT", "LinkUp")], "warn+"),
        ([active(), other("DOWN"), active(downed=1)], "info"),
        ([active(), other("DOWN", downed=0), active(downed=1)], "info"),  # counted late
        ([active(), other("DOWN"), active(downed=3)], "warn+"),
        ([active(), active(downed=1)], "warn+"),
        ([active(downed=5), active(downed=0)], "info"),  # cleared by somebody
        ([active(downed=None), active(downed=3)], "info"),
        ([active(), Port(why="its state cannot be read: x", was_active=True)], "error"),
        ([other("DOWN", was=False), other("DOWN", was=False)], "info"),  # no cable
        ([other("INIT", was=False), active(), other("DOWN")], "warn+"),
    ],
)
def test_a_port_that_breaks_is_one_alert(samples: list[Port], verdict: str) -> None:
    results = judge(PortCheck(PortLimits()), [ports(each) for each in samples])
    assert said(results) == {"mlx5_0/1": verdict}
    assert PortCheck.again_s <= 30


def test_ports_without_a_subnet_manager_have_that_in_common() -> None:
    check = PortCheck(PortLimits())
    waiting = judge(check, [ports(active()), ports(other("INIT", "LinkUp"))])[0]
    down = judge(check, [ports(active()), ports(other("DOWN"))])[0]
    assert (waiting.cause, down.cause) == ("subnet manager", "")
    assert "DOWN (Polling)" in down.why


def test_devices_that_are_ignored() -> None:
    azure = [ports(active(), device="mlx5_an{}"), ports(other("DOWN"), device="mlx5_an{}")]
    assert not judge(PortCheck(PortLimits()), azure)
    assert not judge(DeviceCheck(PortLimits()), [azure[0], ports()])
    assert said(judge(PortCheck(PortLimits(ignore=())), azure)) == {"mlx5_an0/1": "warn+"}


def test_a_port_that_the_job_does_not_use_is_nobody_s_business() -> None:
    """A DPU's, or one for storage: NCCL_IB_HCA names those that count."""
    named = Here(hcas=("mlx5_0",))
    samples = [ports(active(), active()), ports(active(), other("DOWN"))]
    assert said(judge(PortCheck(PortLimits()), samples)) == {
        "mlx5_0/1": "info",
        "mlx5_1/1": "warn+",
    }
    assert said(judge(PortCheck(PortLimits()), samples, here=named)) == {"mlx5_0/1": "info"}
    gone = [ports(active(), active()), ports(active())]
    assert said(judge(DeviceCheck(PortLimits()), gone, here=named)) == {"mlx5_0": "info"}


def test_a_function_that_a_host_lends_to_a_container_may_go() -> None:
    def lent(sample: Ports) -> Ports:
        return msgspec.structs.replace(sample, lent=("mlx5_1",))

    both, one = lent(ports(active(), active())), lent(ports(active()))
    down = lent(ports(active(), other("DOWN")))
    check = DeviceCheck(PortLimits())
    assert said(judge(check, [both, one])) == {"mlx5_0": "info", "mlx5_1": "warn"}
    assert said(judge(PortCheck(PortLimits()), [both, down]))["mlx5_1/1"] == "warn"
    used = Here(hcas=("mlx5_1",))
    assert said(judge(check, [both, one], here=used)) == {"mlx5_1": "evict"}
    assert said(judge(PortCheck(PortLimits()), [both, down], here=used)) == {"mlx5_1/1": "warn+"}


def test_what_happened_while_nobody_could_look_is_no_second_event() -> None:
    """The firmware hung for a while, which ib.answers told, and the link went down by that."""
    samples = [ports(active()), ports(active(downed=1))]
    assert said(judge(PortCheck(PortLimits()), samples, every_s=35.0)) == {"mlx5_0/1": "info"}
    still = [ports(active()), ports(other("DOWN"))]
    assert said(judge(PortCheck(PortLimits()), still, every_s=35.0)) == {"mlx5_0/1": "warn+"}


# --- ib.device -----------------------------------------------------------------------------------


def test_a_device_that_is_gone_leaves_at_once() -> None:
    check = DeviceCheck(PortLimits())
    assert said(judge(check, [ports(active()), ports(active())])) == {"mlx5_0": "info"}
    assert said(judge(check, [ports(active()), ports()])) == {"mlx5_0": "evict"}
    unused = [ports(other("DOWN", was=False)), ports()]
    assert said(judge(check, unused)) == {"mlx5_0": "warn"}
    later = Ports(ports={}, devices=(), met={"mlx5_0": True})
    assert said(judge(check, [ports(), later])) == {"mlx5_0": "evict"}


def test_firmware_that_does_not_answer_is_a_finding() -> None:
    source = PortsSource()
    assert source.unanswered(10.0, 2) is None
    result = source.unanswered(25.0, 5)
    assert result is not None
    assert (result.verdict, result.counts) == (Verdict.SUSPECT, Counts.TWICE)


# --- ib.rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "now", "verdicts"),
    [
        ([active(400)], [active(400)], ["info"]),
        ([active(400)], [active(200)], ["suspect"]),
        ([active(200)], [active(400)], ["info"]),
        (
            [active(400)] * 3 + [active(200)],
            [active(400)] * 3 + [active(200)],
            ["info"] * 3 + ["suspect"],
        ),
        # a card of another kind, for storage
        (
            [active(400)] * 3 + [active(100, board="y")],
            [active(400)] * 3 + [active(100, board="y")],
            ["info"] * 4,
        ),
        ([active(400), active(200)], [active(400), active(200)], ["info"] * 2),
        ([active(400)], [active(None)], ["error"]),
        ([active(400)], [other("DOWN")], []),
    ],
)
def test_slower_than_at_the_start_or_than_equal_ports(
    first: list[Port], now: list[Port], verdicts: list[str]
) -> None:
    results = judge(RateCheck(RateLimits()), [ports(*first), ports(*now)])
    assert list(said(results).values()) == verdicts


def test_a_rate_that_is_expected() -> None:
    check = RateCheck(RateLimits(expected_gbps=400))
    assert said(judge(check, [ports(active(200))])) == {"mlx5_0/1": "suspect"}


# --- ib.errors -----------------------------------------------------------------------------------


def held(values: dict[str, int], why: str = "") -> AllPortCounters:
    return AllPortCounters(ports={"mlx5_0/1": PortCounters(counts=values, why=why)})


def counts(**values: int) -> AllPortCounters:
    return held(values)


def errors(first: dict[str, int], now: dict[str, int], why: str = "", every_s: float = 30.0) -> str:
    check = PortErrorsCheck(PortErrorLimits())
    samples = [held(first), held(now, why)]
    return said(judge(check, samples, every_s=every_s))["mlx5_0/1"]


@pytest.mark.parametrize(
    ("name", "grown", "verdict"),
    [
        ("symbol_error", 300, "info"),
        ("symbol_error", 301, "suspect"),
        ("link_error_recovery", 2, "info"),
        ("link_error_recovery", 3, "suspect"),
        ("port_rcv_errors", 301, "suspect"),
        ("port_rcv_remote_physical_errors", 301, "suspect"),
        ("local_link_integrity_errors", 1, "suspect+"),
        ("excessive_buffer_overrun_errors", 1, "suspect+"),
        ("port_xmit_discards", 3000, "info"),
        ("port_xmit_discards", 3001, "warn"),
    ],
)
def test_errors_that_come_too_fast(name: str, grown: int, verdict: str) -> None:
    assert errors({name: 3, "link_downed": 0}, {name: 3 + grown, "link_downed": 0}) == verdict
    assert errors({name: 9 + grown}, {name: 9}) == "info", "cleared"
    assert errors({name: 3, "link_downed": 0}, {name: 3 + grown, "link_downed": 1}) == "info"


def test_errors_of_a_link_that_is_trained_anew_belong_to_its_fall() -> None:
    """Else one fall, tolerated once, would count twice: with ib.port, and half a minute later."""
    before, down = {"link_downed": 0}, {"link_downed": 1}
    fall = [{**before, **_HARD_0}, {**down, **_HARD_0}, {**down, **_HARD_1}]
    check = PortErrorsCheck(PortErrorLimits())
    for more in range(10):
        samples = [held(each) for each in (*fall, *[fall[-1]] * more)]
        assert said(judge(check, samples, every_s=5.0)) == {"mlx5_0/1": "info"}


_HARD_0 = {"local_link_integrity_errors": 0}
_HARD_1 = {"local_link_integrity_errors": 1}


def test_a_short_history_makes_no_high_rate() -> None:
    assert errors({"symbol_error": 0}, {"symbol_error": 200}, every_s=1.0) == "info"
    assert errors({"symbol_error": 0}, {"symbol_error": 400}, every_s=1.0) == "suspect"


def test_old_errors_and_the_first_look_alarm_nobody() -> None:
    check = PortErrorsCheck(PortErrorLimits())
    assert said(judge(check, [counts(symbol_error=60000)])) == {"mlx5_0/1": "info"}
    assert errors({"symbol_error": 60000}, {"symbol_error": 60000}) == "info"


def test_a_counter_that_is_full_says_nothing_any_more() -> None:
    assert errors({"symbol_error": 0xFFFF}, {"symbol_error": 0xFFFF}) == "error"
    assert errors({"symbol_error": 5}, {"symbol_error": 0xFFFF}) == "suspect"


def test_counters_that_cannot_be_read() -> None:
    check = PortErrorsCheck(PortErrorLimits())
    assert said(judge(check, [held({}, "symbol_error cannot be read")])) == {"mlx5_0/1": "error"}
    assert errors({"symbol_error": 1}, {"symbol_error": 1}, "port_rcv_errors: x") == "error"
    assert not judge(check, [counts()]), "a port without such counters"


def test_a_few_symbol_errors_all_day_long() -> None:
    hours = [counts(symbol_error=200 * hour) for hour in range(4)]
    check = PortErrorsCheck(PortErrorLimits())
    assert said(judge(check, hours, every_s=3600)) == {"mlx5_0/1": "warn"}
    assert said(judge(check, hours[:2], every_s=1800)) == {"mlx5_0/1": "info"}
    quiet = [*hours, *[counts(symbol_error=600)] * 8]
    assert said(judge(check, quiet, every_s=3600)) == {"mlx5_0/1": "info"}


# --- ib.transport --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "grown", "verdict"),
    [
        ("rnr_nak_retry_err", 1, "warn"),
        ("local_ack_timeout_err", 30, "info"),
        ("local_ack_timeout_err", 31, "warn"),
        ("roce_slow_restart", 301, "warn"),
        ("unresponsive_remote_events", 1, "warn"),
        ("rx_drops", 3000, "info"),
    ],
)
def test_connections_that_fail_are_no_strike(name: str, grown: int, verdict: str) -> None:
    check = TransportCheck(TransportLimits())
    samples = [held({name: 7}), held({name: 7 + grown})]
    assert said(judge(check, samples, every_s=30)) == {"mlx5_0/1": verdict}
    assert said(judge(check, samples[::-1], every_s=30)) == {"mlx5_0/1": "info"}
    assert said(judge(check, samples[:1], every_s=30)) == {"mlx5_0/1": "info"}
    assert not judge(check, [counts(symbol_error=1)]), "no such counters"


# --- ib.traffic ----------------------------------------------------------------------------------


def data(words: int) -> AllPortCounters:
    return counts(port_xmit_data=words, port_rcv_data=words)


def test_a_busy_port_that_fell_silent() -> None:
    check = TrafficCheck(TrafficLimits())
    busy = 10**9
    silent = [data(0), *[data(busy)] * 26]
    assert said(judge(check, silent, every_s=5)) == {"mlx5_0/1": "warn"}
    assert said(judge(check, silent[:20], every_s=5)) == {"mlx5_0/1": "info"}, "not long yet"
    moving = [data(busy + n * 10**6) for n in range(27)]
    assert said(judge(check, [data(0), *moving], every_s=5)) == {"mlx5_0/1": "info"}
    idle = [data(busy)] * 27
    assert said(judge(check, idle, every_s=5)) == {"mlx5_0/1": "info"}, "it never was busy"
    reset = [data(2**40), *[data(0)] * 26]
    assert said(judge(check, reset, every_s=5)) == {"mlx5_0/1": "info"}


def test_traffic_is_bytes_a_second() -> None:
    check = TrafficCheck(TrafficLimits())
    values = judge(check, [data(0), data(500)], every_s=5)[0].values
    assert values == {"tx_bytes_per_s": 400.0, "rx_bytes_per_s": 400.0}
    wrapped = judge(check, [data(2**32 - 100), data(400)], every_s=5)[0].values
    assert wrapped == values
    assert not judge(check, [data(2**40), data(400)], every_s=5)[0].values
    efa = [counts(tx_bytes=0, rx_bytes=0), counts(tx_bytes=50, rx_bytes=100)]
    assert judge(check, efa, every_s=5)[0].values == {
        "tx_bytes_per_s": 10.0,
        "rx_bytes_per_s": 20.0,
    }
    marked = [
        counts(port_xmit_data=0, port_rcv_data=0, np_cnp_sent=n, port_xmit_wait=n) for n in (0, 50)
    ]
    values = judge(check, marked, every_s=5)[0].values
    assert values["congestion_packets_per_s"] == values["transmit_wait_ticks_per_s"] == 10.0


# --- ib.gid --------------------------------------------------------------------------------------


def test_gids_that_are_gone_or_changed() -> None:
    check = GidCheck(PortLimits())
    full = Gids(ports={"mlx5_0/1": {0: "IB/RoCE v1", 3: "RoCE v2"}})
    assert said(judge(check, [full, full])) == {"mlx5_0/1": "info"}
    gone = judge(check, [full, Gids(ports={"mlx5_0/1": {0: "IB/RoCE v1"}})])
    assert said(gone) == {"mlx5_0/1": "suspect"}
    assert "3 (RoCE v2) is empty now" in gone[0].why
    changed = Gids(ports={"mlx5_0/1": {0: "IB/RoCE v1", 3: "IB/RoCE v1", 4: "RoCE v2"}})
    assert said(judge(check, [full, changed])) == {"mlx5_0/1": "suspect"}
    unread = Gids(ports={}, unread={"mlx5_0/1": "Permission denied"})
    assert said(judge(check, [full, unread])) == {"mlx5_0/1": "error"}
