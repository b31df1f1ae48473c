"""Checks of network interfaces, InfiniBand and RoCE ports, and of who can be reached."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource
from everstep.agent.checks.net.answers import InterfacesAnswer, PortsAnswer
from everstep.agent.checks.net.conntrack import ConntrackCheck
from everstep.agent.checks.net.errors import ErrorsCheck
from everstep.agent.checks.net.ib_device import DeviceCheck
from everstep.agent.checks.net.ib_errors import PortErrorsCheck
from everstep.agent.checks.net.ib_gid import GidCheck
from everstep.agent.checks.net.ib_port import PortCheck
from everstep.agent.checks.net.ib_rate import RateCheck
from everstep.agent.checks.net.ib_traffic import TrafficCheck
from everstep.agent.checks.net.ib_transport import TransportCheck
from everstep.agent.checks.net.interfaces import InterfacesSource
from everstep.agent.checks.net.link import LinkCheck
from everstep.agent.checks.net.mtu import MtuCheck
from everstep.agent.checks.net.port_counters import PortCountersSource
from everstep.agent.checks.net.port_gids import GidsSource
from everstep.agent.checks.net.ports import PortsSource
from everstep.agent.checks.net.reach import ReachSource
from everstep.agent.checks.net.retransmits import RetransmitsCheck
from everstep.agent.checks.net.speed import SpeedCheck
from everstep.agent.checks.net.switch import SwitchCheck
from everstep.agent.checks.net.tcp import TcpSource

SOURCES: tuple[MakeSource, ...] = (
    InterfacesSource,
    PortsSource,
    PortCountersSource,
    GidsSource,
    TcpSource,
    ReachSource,
)
CHECKS: tuple[MakeCheck, ...] = (
    LinkCheck,
    InterfacesAnswer,
    SpeedCheck,
    ErrorsCheck,
    MtuCheck,
    RetransmitsCheck,
    ConntrackCheck,
    SwitchCheck,
    PortsAnswer,
    DeviceCheck,
    PortCheck,
    RateCheck,
    PortErrorsCheck,
    TransportCheck,
    TrafficCheck,
    GidCheck,
)
