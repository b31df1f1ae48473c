"""The source "nvml-events": XIDs as the driver reports them, for users who cannot read its log.

It waits inside NVML, so it has a child process of its own and tells of an XID within milliseconds.
After each wait it asks every GPU a short question: so a driver that hangs is found within 10 s, and
a lost GPU within two.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.gpu.library import (
    Library,
    NvmlFailed,
    driver_version,
    hung,
    is_ours,
    why_absent,
)
from everstep.agent.checks.gpu.reading import RECOVERY_ACTION_FIELD, read_field
from everstep.agent.checks.gpu.samples import Code, XidSample
from everstep.agent.checks.xids import XidEvent, pci_address
from everstep.health import Result
from everstep.model import Seconds

XID_EVENTS = 8
"""nvmlEventTypeXidCriticalError."""
WAIT_S: Seconds = 2.0
"""Between two questions to the GPUs."""
LOST_S: Seconds = 1.0
"""Pause while waiting returns at once, since a GPU is lost."""
HUNG_S: Seconds = 9.0
HUNG_TIMES = 2
"""ByteRobust finds a hung driver within 10 s: two children of 4 s each do not come back, or the
first cannot even be ended."""
KEEP_S: Seconds = 86_400.0
"""XIDs are told again for a day: a repeat makes another verdict."""
KEEP_MOST = 256


class XidSource(Source[XidSample]):
    """XIDs of all GPUs, since this source began to run."""

    name = "nvml-events"
    kind = XidSample
    every_s = 0.0
    blocks = True
    within_s = 4.0

    def __init__(self) -> None:
        self._library = Library()
        self._watched: Any = None
        self._handles: dict[str, Any] = {}
        self._version = ""
        self._events: deque[XidEvent] = deque(maxlen=KEEP_MOST)

    def absent(self, here: Here) -> str:
        self._version = driver_version(here)
        return why_absent(here)

    def sample(self, here: Here) -> XidSample:
        answers: dict[str, int] = {}
        try:
            starting_s = self._library.open()
            if not starting_s:
                self._wait()
                answers = self._ask(here)
        except NvmlFailed as failed:
            self._library.forget()
            self._watched = None
            raise NotReadable(f"NVML returned {failed.code}") from failed
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        while self._events and self._events[0].at < now - KEEP_S:
            self._events.popleft()
        return XidSample(
            driver=driver_version(here),
            starting_s=starting_s,
            answers=answers,
            events=tuple(event for event in self._events if is_ours(event.pci, here)),
        )

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        if times < HUNG_TIMES and for_s < HUNG_S:
            return None
        return hung("gpu.answers", self._version, for_s)

    def _wait(self) -> None:
        """Until something happens, at most WAIT_S; not at all when NVML was just opened."""
        nvml = self._library.nvml
        try:
            if self._watched is None:
                self._watched, self._handles = _watch(nvml)
                return
            self._note(nvml, nvml.nvmlEventSetWait(self._watched, int(WAIT_S * 1000)))
        except nvml.NVMLError as error:
            if error.value == Code.GPU_IS_LOST:  # told for as long as one is
                time.sleep(LOST_S)
            elif error.value != Code.TIMEOUT:
                raise NvmlFailed(error.value) from error

    def _ask(self, here: Here) -> dict[str, int]:
        """Ask each GPU of ours something that only its driver can answer."""
        nvml = self._library.nvml
        answers = {}
        for pci, handle in self._handles.items():
            if not is_ours(pci, here):
                continue
            try:
                nvml.nvmlDeviceGetUtilizationRates(handle)
            except nvml.NVMLError as error:
                answers[pci] = int(error.value)
            else:
                answers[pci] = 0
        return answers

    def _note(self, nvml: Any, event: Any) -> None:
        if event.eventType != XID_EVENTS:
            return
        self._events.append(
            XidEvent(
                at=time.clock_gettime(time.CLOCK_BOOTTIME),
                pci=_address(nvml, event.device),
                code=int(event.eventData),
                action=read_field(nvml, event.device, RECOVERY_ACTION_FIELD),
            )
        )


def _watch(nvml: Any) -> tuple[Any, dict[str, Any]]:
    """A set that gets the XIDs of every GPU that can tell of them; and handles by address."""
    watched = nvml.nvmlEventSetCreate()
    handles = {}
    registered = 0
    refused = None
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            handles[_address(nvml, handle) or f"#{index}"] = handle
            nvml.nvmlDeviceRegisterEvents(handle, XID_EVENTS, watched)
            registered += 1
        except nvml.NVMLError as error:
            refused = error
    if refused is not None and not registered:
        raise refused
    return watched, handles


def _address(nvml: Any, handle: Any) -> str:
    try:
        return pci_address(str(nvml.nvmlDeviceGetPciInfo(handle).busId))
    except (nvml.NVMLError, ValueError):
        return ""
