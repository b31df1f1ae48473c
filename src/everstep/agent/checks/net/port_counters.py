"""The source "infiniband.counters": error and traffic counters of RDMA ports, every 5 seconds.

Apart from the state of ports, which is read every second, because every counter is a question to
the card. Which judge wants which counter is said in their files.
"""

from __future__ import annotations

from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.net import sysfs
from everstep.agent.checks.net.ports import CLASS, class_absent
from everstep.model import Value

COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
    "port_xmit_wait",
    "port_xmit_data",
    "port_rcv_data",
)
"""Of counters/: those of the InfiniBand specification."""
HW_COUNTERS = (
    "local_ack_timeout_err",
    "packet_seq_err",
    "rnr_nak_retry_err",
    "roce_slow_restart",
    "rx_icrc_encapsulated",
    "req_cqe_error",
    "resp_cqe_error",
    "np_cnp_sent",
    "rp_cnp_handled",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "tx_bytes",
    "rx_bytes",
    "rdma_read_bytes",
    "rdma_write_bytes",
    "rdma_write_recv_bytes",
)
"""Of hw_counters/: those of mlx5 (RoCE and RC transport) and, the last eight, of EFA."""
RARELY = 12
"""Samples between two looks at which files there are."""


class PortCounters(Value, frozen=True, kw_only=True):
    """Counters of one port."""

    counts: dict[str, int]
    why: str = ""
    """Why counters that exist cannot be read, for the first of them."""


class AllPortCounters(Value, frozen=True, kw_only=True):
    """A sample."""

    ports: dict[str, PortCounters]
    """By device/port, as in mlx5_0/1."""


class PortCountersSource(Source[AllPortCounters]):
    """Reads counters and hw_counters of all ports."""

    name = "infiniband.counters"
    kind = AllPortCounters
    every_s = 5.0
    blocks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._rounds = 0
        self._devices: list[str] = []
        self._files: dict[str, tuple[tuple[str, str], ...]] = {}

    def absent(self, here: Here) -> str:
        return class_absent(here)

    def sample(self, here: Here) -> AllPortCounters:
        directory = sysfs.place(here, CLASS)
        devices = sysfs.listed(directory)
        if self._rounds % RARELY == 0 or devices != self._devices:
            self._devices = devices
            self._files = {
                f"{device}/{number}": tuple(_files(f"{directory}/{device}/ports/{number}"))
                for device in devices
                for number in sysfs.names(f"{directory}/{device}/ports")
            }
        self._rounds += 1
        return AllPortCounters(ports={name: _look(files) for name, files in self._files.items()})


def _files(at: str) -> list[tuple[str, str]]:
    """Name and path of each counter of the port that we want and it has."""
    found = []
    for below, wanted in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
        there = set(sysfs.names(f"{at}/{below}"))
        found += [(name, f"{at}/{below}/{name}") for name in wanted if name in there]
    return found


def _look(files: tuple[tuple[str, str], ...]) -> PortCounters:
    counts: dict[str, int] = {}
    why = ""
    for name, path in files:
        try:
            counts[name] = int(sysfs.read(path))
        except OSError as error:
            why = why or f"{name} cannot be read: {error.strerror}"
        except ValueError:
            why = why or f"{name} holds no number"
    return PortCounters(counts=counts, why=why)
