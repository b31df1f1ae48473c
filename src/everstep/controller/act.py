"""Carries out what the core decided: orders go to agents, the rest is done here.

Called by loop.py after the journal has it. Every action may come twice (a restarted controller
repeats what has no answer yet) and must then be harmless. Results return to the loop as events.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from everstep.actions import (
    BeginGeneration,
    CloseIncident,
    ControllerAction,
    EvictMachine,
    FinishJob,
    Imperative,
    InjectFault,
    OpenIncident,
    Order,
    PageHuman,
    PublishStep,
    RequestMachines,
)
from everstep.checkpoint.tier import tier_at
from everstep.cluster.base import Cluster, RequestRefused
from everstep.controller.agents import Agents
from everstep.controller.incoming import Incoming
from everstep.controller.log import say
from everstep.core.controller import ControllerCore
from everstep.core.quarantine import taken_away
from everstep.events import (
    ControllerEvent,
    ControllerStarted,
    FaultInjected,
    MachineJoined,
    MachineReleased,
    MachineSilent,
    MachinesRequested,
    StepPublished,
)
from everstep.journal import Journal
from everstep.model import EverstepError, MachineId, Published

ANSWERED_WITHIN_S = 0.1
"""Who asks the controller to kill itself hears before that the request was accepted."""


class Hands:
    """Of one controller."""

    def __init__(
        self,
        *,
        core: ControllerCore,
        journal: Journal,
        agents: Agents,
        cluster: Cluster,
        post: Callable[[Incoming], None],
    ) -> None:
        self._refusal = ""
        """Why the newest request for machines was refused."""
        self._core = core
        self._journal = journal
        self._agents = agents
        self._cluster = cluster
        self._post = post
        self._publishing: set[asyncio.Task[None]] = set()
        self._by_type: dict[type[Imperative], Callable[[Any], None]] = {
            EvictMachine: self._evict,
            RequestMachines: self._request,
            PublishStep: self._publish,
        }

    def act(self, event: ControllerEvent, actions: list[ControllerAction]) -> None:
        """Do these, and repeat what a newcomer or a new term has to hear again."""
        for action in (*actions, *self._repeated(event, actions)):
            self._carry_out(action)
        if isinstance(event, MachineReleased | MachineSilent):
            self._give_back(event.machine)

    def notes(self) -> list[str]:
        """What a person must do so that the job gets what it waits for."""
        return [self._refusal] if self._refusal and self._core.state.requested else []

    def _repeated(
        self, event: ControllerEvent, actions: list[ControllerAction]
    ) -> list[ControllerAction]:
        if isinstance(event, MachineJoined):
            repeated = self._core.outstanding(event.machine)
        elif isinstance(event, ControllerStarted):
            repeated = self._core.outstanding(None)
        else:
            return []
        return [action for action in repeated if action not in actions]

    def _carry_out(self, action: ControllerAction) -> None:
        if isinstance(action, InjectFault) and action.machine is None:
            self._end_myself(action)
        elif isinstance(action, Order):
            self._agents.order(action)
        elif type(action) in self._by_type:
            self._by_type[type(action)](action)
        if isinstance(action, _TOLD):
            say(f"{type(action).__name__} {action.id}: {action.why}")

    def _evict(self, action: EvictMachine) -> None:
        self._give_back(action.machine)

    def _give_back(self, machine: MachineId) -> None:
        """Not while an evicted machine gives shards, is tested, or leaves in good order."""
        if taken_away(self._core.state, machine):
            self._cluster.release(machine)

    def _request(self, action: RequestMachines) -> None:
        try:
            request = self._cluster.request(action.count, action.id)
            say(str(request))
            request.send()
        except (RequestRefused, OSError) as error:
            self._refusal = str(error)
            self._post(Incoming(MachinesRequested(action=action.id, reason=str(error))))
        else:
            self._refusal = ""
            self._post(Incoming(MachinesRequested(action=action.id)))

    def _publish(self, action: PublishStep) -> None:
        task = asyncio.get_running_loop().create_task(self._publish_in_thread(action))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _publish_in_thread(self, action: PublishStep) -> None:
        """In a thread: the directory may lie on a slow file system that all machines share."""
        spec = self._core.state.job_at(action.generation)
        stored_bytes = 0
        try:
            tier = await asyncio.to_thread(tier_at, spec.checkpoint.directory)
            entry = Published(step=action.step, generation=action.generation)
            await asyncio.to_thread(tier.publish, entry, spec.world_size, spec.checkpoint.keep)
            manifest = await asyncio.to_thread(tier.manifest, action.step)
            stored_bytes = sum(manifest.payload_bytes)
            reason = ""
        except (EverstepError, OSError) as error:
            reason = str(error)
            say(f"step {action.step} was not published: {reason}")
        published = StepPublished(
            action=action.id,
            step=action.step,
            generation=action.generation,
            reason=reason,
            stored_bytes=stored_bytes,
        )
        self._post(Incoming(published))

    def _end_myself(self, action: InjectFault) -> None:
        """Once it is on disk that the fault was injected: the next term must not do it again."""
        injected = Incoming(FaultInjected(action=action.id, fault=action.fault), then=self._kill)
        asyncio.get_running_loop().call_later(ANSWERED_WITHIN_S, self._post, injected)

    def _kill(self) -> None:
        self._journal.sync()
        os.kill(os.getpid(), signal.SIGKILL)


_TOLD = (
    BeginGeneration,
    CloseIncident,
    EvictMachine,
    FinishJob,
    OpenIncident,
    PageHuman,
    RequestMachines,
)
"""Decisions that have a line in the log."""
