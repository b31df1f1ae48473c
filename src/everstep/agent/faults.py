"""Breaks this machine on purpose, as `everstep inject` asks: always by kill -9, as real faults do.

The shell says that the fault is about to happen and waits until the controller knows, then calls
`inject`. Some faults do not return.
"""

from __future__ import annotations

import os
import shutil
import signal

from everstep.actions import InjectFault
from everstep.agent.this_machine import ThisMachine
from everstep.agent.watch import Watched
from everstep.model import Fault
from everstep.processes import descendants, read_pid_file, send_signal


def inject(order: InjectFault, here: ThisMachine, running: list[Watched]) -> None:
    """Do it. A fault whose victim is not there is no fault: nothing happens."""
    if order.fault is Fault.KILL_RANK:
        victims = [w for w in running if order.rank in (None, w.rank)]
        for watched in victims[:1]:
            send_signal(watched.process, signal.SIGKILL)
    elif order.fault is Fault.KILL_LAUNCHER:
        _kill(here, "launcher")
    elif order.fault is Fault.KILL_AGENT:
        os.kill(os.getpid(), signal.SIGKILL)
    elif order.fault is Fault.LOSE_MACHINE:
        lose_machine(here)


def lose_machine(here: ThisMachine) -> None:
    """The keeper first, so that nothing comes back; then memory, every process, and this one."""
    keeper = read_pid_file(here.paths.pid_file("keeper"))
    below = [] if keeper is None else descendants([keeper])
    _kill(here, "keeper")
    shutil.rmtree(here.shm, ignore_errors=True)
    for process in below:
        if process.pid != os.getpid():
            send_signal(process, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(here: ThisMachine, service: str) -> None:
    process = read_pid_file(here.paths.pid_file(service))
    if process is not None:
        send_signal(process, signal.SIGKILL)
