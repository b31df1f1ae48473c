"""Sources of RDMA ports on trees of files that change, vanish, are forbidden or hold garbage."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from everstep.agent.checks.check import Here
from everstep.agent.checks.net.ib_device import DeviceCheck
from everstep.agent.checks.net.ib_errors import PortErrorLimits, PortErrorsCheck
from everstep.agent.checks.net.ib_port import PortCheck
from everstep.agent.checks.net.ignoring import PortLimits
from everstep.agent.checks.net.port_counters import RARELY, PortCountersSource
from everstep.agent.checks.net.port_gids import GidsSource
from everstep.agent.checks.net.ports import RARELY as RATE_RARELY
from everstep.agent.checks.net.ports import Ports, PortsSource
from tests.agent.checks.net.judging import judge, said
from tests.agent.checks.net.trees import as_ordinary_user, port, write

PORT = PortCheck(PortLimits())
DEVICE = DeviceCheck(PortLimits())
ERRORS = PortErrorsCheck(PortErrorLimits())
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def test_ports_of_infiniband_and_of_efa_are_read(here: Here) -> None:
    port(here, "mlx5_0")
    port(here, "mlx5_0", 2, state="1: DOWN", phys_state="3: Disabled")
    efa = port(here, "rdmap0s6", link_layer="Unspecified", rate="garbage")
    shutil.rmtree(efa / "counters")
    source = PortsSource()
    assert not source.absent(here)
    sample = source.sample(here)
    assert sample.devices == ("mlx5_0", "rdmap0s6")
    first = sample.ports["mlx5_0/1"]
    assert (first.state, first.physical, first.rate_gbps) == ("ACTIVE", "LinkUp", 400.0)
    assert (first.board, first.link_layer) == ("MT4129 MT_0000000838", "InfiniBand")
    second = sample.ports["mlx5_0/2"]
    assert (second.state, second.physical, second.was_active) == ("DOWN", "Disabled", False)
    third = sample.ports["rdmap0s6/1"]
    assert (third.state, third.downed, third.rate_gbps) == ("ACTIVE", None, None)
    assert msgspec.json.decode(msgspec.json.encode(sample), type=Ports) == sample


def test_a_port_goes_down_flaps_and_its_card_is_gone(here: Here) -> None:
    path = port(here, "mlx5_0")
    source = PortsSource()
    samples = [source.sample(here)]
    write(path, {"state": "1: DOWN", "phys_state": "2: Polling", "counters/link_downed": 1})
    samples.append(source.sample(here))
    assert said(judge(PORT, samples)) == {"mlx5_0/1": "warn+"}
    write(path, {"state": "4: ACTIVE", "phys_state": "5: LinkUp"})
    samples.append(source.sample(here))
    assert said(judge(PORT, samples)) == {"mlx5_0/1": "info"}
    write(path, {"counters/link_downed": 3})
    samples.append(source.sample(here))
    assert said(judge(PORT, samples)) == {"mlx5_0/1": "warn+"}
    shutil.rmtree(here.path("/sys/class/infiniband/mlx5_0"))
    samples.append(source.sample(here))
    assert not judge(PORT, samples)
    assert said(judge(DEVICE, samples)) == {"mlx5_0": "evict"}
    here.path("/sys/class/infiniband").rmdir()
    samples.append(source.sample(here))
    assert said(judge(DEVICE, samples)) == {"mlx5_0": "evict"}, "its driver was unloaded"
    assert PortsSource().absent(here)


def test_a_port_that_appears_later_is_found(here: Here) -> None:
    port(here, "mlx5_0")
    source = PortsSource()
    source.sample(here)
    port(here, "mlx5_0", 2)
    assert set([source.sample(here) for _ in range(RATE_RARELY)][-1].ports) == {
        "mlx5_0/1",
        "mlx5_0/2",
    }


def test_virtual_functions_beside_their_device_may_be_lent(here: Here) -> None:
    for device in ("mlx5_0", "mlx5_1"):
        port(here, device)
    source = PortsSource()
    virtual = here.path("/sys/class/infiniband/mlx5_1/device")
    virtual.mkdir()
    (virtual / "physfn").symlink_to("../../mlx5_0")
    assert source.sample(here).lent == ("mlx5_1",)
    shutil.rmtree(here.path("/sys/class/infiniband/mlx5_1"))
    assert source.sample(here).lent == ("mlx5_1",), "also when it is gone"
    port(here, "mlx5_1")
    virtual.mkdir()
    (virtual / "physfn").symlink_to(here.path("/"))
    shutil.rmtree(here.path("/sys/class/infiniband/mlx5_0"))
    assert PortsSource().sample(here).lent == (), "in a container it is all there is"


def test_the_rate_is_read_rarely_and_when_a_port_comes_up(here: Here) -> None:
    path = port(here, "mlx5_0")
    source = PortsSource()
    source.sample(here)
    write(path, {"rate": "200 Gb/sec (2X NDR)"})
    rates = [source.sample(here).ports["mlx5_0/1"].rate_gbps for _ in range(RATE_RARELY)]
    assert rates.index(200.0) == RATE_RARELY - 1
    write(path, {"state": "1: DOWN"})
    source.sample(here)
    write(path, {"state": "4: ACTIVE", "rate": "100 Gb/sec (1X NDR)"})
    assert source.sample(here).ports["mlx5_0/1"].rate_gbps == 100.0


@pytest.mark.parametrize("state", ["", "4", "ACTIVE", "9: WHAT", "x" * 5000, "\x00\x01"])
def test_a_state_that_is_garbage_is_no_port_that_is_down(here: Here, state: str) -> None:
    path = port(here, "mlx5_0")
    source = PortsSource()
    samples = [source.sample(here)]
    write(path, {"state": state, "counters/link_downed": "?"})
    samples.append(source.sample(here))
    assert said(judge(PORT, samples)) == {"mlx5_0/1": "error"}


def test_files_that_vanish_or_are_forbidden_are_no_port_that_is_down(here: Here) -> None:
    path = port(here, "mlx5_0", counters__symbol_error=5)
    source, counters = PortsSource(), PortCountersSource()
    samples = [source.sample(here)]
    counts = [counters.sample(here)]
    (path / "state").chmod(0)
    (path / "counters/symbol_error").chmod(0)
    with as_ordinary_user():
        samples.append(source.sample(here))
        counts.append(counters.sample(here))
    assert said(judge(PORT, samples)) == {"mlx5_0/1": "error"}
    assert said(judge(ERRORS, counts, every_s=5)) == {"mlx5_0/1": "error"}
    shutil.rmtree(path)
    samples.append(source.sample(here))
    counts.append(counters.sample(here))
    assert said(judge(PORT, samples)) == {"mlx5_0/1": "error"}
    assert said(judge(ERRORS, counts, every_s=5)) == {"mlx5_0/1": "error"}
    assert said(judge(DEVICE, samples)) == {"mlx5_0": "info"}
    here.path("/sys/class/infiniband").chmod(0)
    with as_ordinary_user(), pytest.raises(PermissionError):
        source.sample(here)


def test_counters_of_both_directories_and_of_new_devices(here: Here) -> None:
    path = port(
        here,
        "mlx5_0",
        counters__symbol_error=5,
        counters__unknown=1,
        counters__port_rcv_data=2**63,
        hw_counters__rnr_nak_retry_err=1,
        hw_counters__lifespan=10,
    )
    source = PortCountersSource()
    counts = source.sample(here).ports["mlx5_0/1"].counts
    assert counts == {
        "symbol_error": 5,
        "link_downed": 0,
        "port_rcv_data": 2**63,
        "rnr_nak_retry_err": 1,
    }
    write(path, {"hw_counters/packet_seq_err": 3, "counters/symbol_error": "garbage"})
    port(here, "mlx5_1")
    sample = source.sample(here)
    assert sample.ports["mlx5_0/1"].counts["packet_seq_err"] == 3
    assert sample.ports["mlx5_0/1"].why == "symbol_error holds no number"
    assert "mlx5_1/1" in sample.ports
    shutil.rmtree(here.path("/sys/class/infiniband/mlx5_1"))
    assert [set(source.sample(here).ports) for _ in range(RARELY)][-1] == {"mlx5_0/1"}


def test_a_writer_beside_the_reader_never_makes_an_alarm(here: Here) -> None:
    """Files are cut to nothing and written anew while they are read, and counters are reset."""
    path = port(here, "mlx5_0", counters__symbol_error=0, counters__port_rcv_errors=0)
    begun, stop = threading.Event(), threading.Event()

    def change(files: Path) -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 50
            write(files, {"counters/symbol_error": number, "state": "4: ACTIVE"})
            begun.set()

    writer = threading.Thread(target=change, args=(path,))
    writer.start()
    try:
        assert begun.wait(10)
        states, counters = PortsSource(), PortCountersSource()
        samples = [states.sample(here) for _ in range(300)]
        counts = [counters.sample(here) for _ in range(300)]
        seen = {each.ports["mlx5_0/1"].counts.get("symbol_error") for each in counts}
        while len(seen) < 2:  # on a busy machine the writer may have rested all the time
            counts.append(counters.sample(here))
            seen.add(counts[-1].ports["mlx5_0/1"].counts.get("symbol_error"))
    finally:
        stop.set()
        writer.join()
    verdicts = {
        verdict
        for check, series in ((PORT, samples), (DEVICE, samples), (ERRORS, counts))
        for end in range(2, len(series))
        for verdict in said(judge(check, series[max(0, end - 8) : end], every_s=5)).values()
    }
    assert verdicts <= {"info", "error"}


def test_tables_of_gids(here: Here) -> None:
    path = port(here, "mlx5_0")
    write(path / "gids", {str(number): ZERO for number in range(20)})
    write(path / "gids", {"0": "fe80::1", "3": "::ffff:10.0.0.1", "17": "fe80::2"})
    write(path / "gid_attrs/types", {"0": "IB/RoCE v1", "3": "RoCE v2"})
    port(here, "mlx5_1")
    source = GidsSource()
    assert not source.absent(here)
    sample = source.sample(here)
    assert sample.ports == {"mlx5_0/1": {0: "IB/RoCE v1", 3: "RoCE v2"}}
    assert sample.unread == {"mlx5_1/1": "No such file or directory"}
    (path / "gids").chmod(0)
    with as_ordinary_user():
        assert source.sample(here).unread["mlx5_0/1"] == "Permission denied"
