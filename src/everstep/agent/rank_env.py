"""What each rank of an order gets: torchrun's variables, its log, its slot. Pure.

torchrun's names keep torchrun's meaning (docs.pytorch.org/docs/stable/elastic/run.html), so that a
script cannot tell the difference. Used by agent/launching.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.actions import StartRanks
from everstep.agent.fork import ForkRequest, RankPlan
from everstep.agent.placing import CODE_VERSION, Places
from everstep.agent.this_machine import ThisMachine
from everstep.core.sizes import replica
from everstep.model import NO_VERSION, Rank, Term
from everstep.trainer.context import VARIABLE, AttachContext

ROLE = "default"
"""torchrun's default: one role for all. `everstep run --role` puts another into the job's env."""


_UNLESS_SET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets unless the user has."""
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Collectives that each rank's flight recorder keeps, whatever its back end: torch's own example.
"""
_FLIGHT_RECORDER_BEFORE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""The name that it had before."""


def fork_request(
    here: ThisMachine,
    order: StartRanks,
    term: Term,
    base: Mapping[str, str],
    places: Places = (),
) -> ForkRequest:
    """What the launcher must do to carry out this order. `base` is this machine's environment,
    `places` says where the order's code version lies.
    """
    spec = here.spec
    defaults = _defaults(here, base)
    code = {CODE_VERSION: str(order.version)} if order.version != NO_VERSION else {}
    plans = [
        RankPlan(
            rank=rank,
            slot=slot,
            env=defaults | _env(here, order, rank) | code | _attach(here, order, rank, term),
            log=str(here.paths.rank_log(order.generation, rank)),
        )
        for slot, rank in enumerate(here.ranks_of(order.node_rank))
    ]
    return ForkRequest(
        generation=order.generation,
        command=spec.command,
        module=spec.module,
        no_python=spec.no_python,
        no_fork=spec.no_fork,
        working_dir=spec.working_dir,
        heartbeat=str(here.heartbeat),
        ranks=tuple(plans),
        places=places,
    )


def _defaults(here: ThisMachine, base: Mapping[str, str]) -> dict[str, str]:
    defaults = dict(_UNLESS_SET)
    if here.spec.nproc_per_node > 1:
        # torchrun's protection against every rank using every core.
        defaults["OMP_NUM_THREADS"] = "1"
    told = {**base, **here.setup.env, **here.spec.env}
    if _FLIGHT_RECORDER_BEFORE not in told:
        defaults |= _FLIGHT_RECORDER
    return {name: value for name, value in defaults.items() if name not in told}


def _env(here: ThisMachine, order: StartRanks, rank: Rank) -> dict[str, str]:
    spec = here.job_of(order)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank - spec.ranks_of(order.node_rank)[0],
        "WORLD_SIZE": spec.world_size,
        "LOCAL_WORLD_SIZE": spec.nproc_per_node,
        "GROUP_RANK": order.node_rank,
        "GROUP_WORLD_SIZE": spec.nnodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "MASTER_PORT": order.master_port,
        "TORCHELASTIC_RESTART_COUNT": order.restarts,
        "TORCHELASTIC_MAX_RESTARTS": max(order.restarts, spec.policy.recoveries_max),
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "ROLE_NAME": spec.env.get("ROLE_NAME", ROLE),
        "MASTER_ADDR": order.master_addr,
        "TORCHELASTIC_RUN_ID": spec.env.get("TORCHELASTIC_RUN_ID", spec.job),
        "TORCHELASTIC_ERROR_FILE": str(here.paths.error_file(order.generation, rank)),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _attach(here: ThisMachine, order: StartRanks, rank: Rank, term: Term) -> dict[str, str]:
    spec = here.job_of(order)
    context = AttachContext(
        job=spec.job,
        machine=here.setup.machine,
        term=term,
        generation=order.generation,
        rank=rank,
        local_rank=rank - spec.ranks_of(order.node_rank)[0],
        world_size=spec.world_size,
        shm=str(here.shm),
        notice_socket=str(here.paths.notice_socket),
        restore=order.restore,
        restore_generation=order.restore_generation,
        restore_rank=dict(order.restores).get(rank),
        restore_world=here.savers_of(order) if order.restore_nnodes else 0,
        dp=spec.dp,
        dp_full=here.spec.dp,
        replica=replica(spec, rank),
        local_disk=str(here.local_disk or ""),
        checkpoint_dir=spec.checkpoint.directory,
        backups=here.spec.backs_up,
    )
    return {VARIABLE: msgspec.json.encode(context).decode()}
