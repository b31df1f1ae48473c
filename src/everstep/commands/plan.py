"""From the flags of `everstep run` and the facts of this host to a plan: pure, so that it can be
shown by --dry-run and tested as a table.

run.py gathers the facts, asks `plan`, and carries the plan out. Nothing here reads the machine,
the environment or a clock.
"""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path

from everstep.agent.checks.registry import make_checks
from everstep.checkpoint.tier import FILE, TierFailed, is_url, tier_at
from everstep.commands.elastic import check_elastic, read_elastic
from everstep.commands.flags import RunFlags
from everstep.commands.layout_text import layout_spec
from everstep.commands.policy import read_policy
from everstep.core.groups import layout_of
from everstep.model import (
    CheckLimits,
    CheckpointSpec,
    ChecksSpec,
    CodeSpec,
    Every,
    JobId,
    JobSpec,
    LayoutSpec,
    UserError,
    Value,
)

JOIN_TIMEOUT_S = 600.0
"""How long a machine waits for the controller: torchrun's default join_timeout."""
STATIC_PORT = 29500
"""torchrun's --master-port."""
C10D_PORT = 29400
"""torchrun's port of a c10d endpoint that names none."""
AUTO = "auto"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_UNIT = re.compile(r"[a-z][a-z0-9_-]*:[^\s:,]+")
_RDZV_KEYS = ("is_host", "join_timeout")
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")
_STREAMS_BOTH = "3"
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class HostFacts(Value, frozen=True, kw_only=True):
    """What the plan must know about the host it is made on."""

    state_dir: str
    """Absolute path of the directory of all jobs."""
    working_dir: str
    cpus: int
    """Cores that this process may use."""
    gpus: int
    """GPUs that a rank here would see."""
    uid: str
    """Eight fresh hex digits."""
    endpoint_here: bool = False
    """Whether the address of the endpoint is one of this host."""
    check_limits: CheckLimits = {}
    """Content of the file of --check-limits."""
    units: tuple[str, ...] = ()
    """What the scheduler says that this host shares with others, as KIND:NAME."""
    script_root: str = ""
    """Absolute directory that Python puts in front of sys.path, without symbolic links."""
    source_roots: tuple[str, ...] = ()
    """The directories of --source-root, likewise."""


class Leads(StrEnum):
    """Whether this call starts the controller."""

    MUST = "must"
    MAY = "may"
    """If no other call of this host was faster."""
    NO = "no"


class Address(Value, frozen=True, kw_only=True):
    """Where the controller listens, as the flags say."""

    host: str
    port: int
    """0: any free port."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def bind(self) -> str:
        """What the controller binds: loopback if the endpoint is, else every interface."""
        if self.host == "localhost":
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return "0.0.0.0"
        if address.is_loopback:
            return self.host
        return "::" if address.version == 6 else "0.0.0.0"


class Shown(Value, frozen=True, kw_only=True):
    """Which ranks' output the terminal shows, by local rank."""

    only: tuple[int, ...] = ()
    """Empty: all."""
    hidden: tuple[int, ...] = ()
    hide_all: bool = False

    def shows(self, local_rank: int) -> bool:
        if self.hide_all or local_rank in self.hidden:
            return False
        return not self.only or local_rank in self.only


class Plan(Value, frozen=True, kw_only=True):
    """What `everstep run` will do."""

    spec: JobSpec
    state_dir: str
    chosen: bool
    """Whether the user named the job; a name of ours may take the place of a finished job."""
    leads: Leads
    joins: bool
    """Whether this host joins as a machine by itself; stand-ins are started by the controller."""
    address: Address
    node_rank: int | None = None
    local_addr: str | None = None
    units: tuple[str, ...] = ()
    """As in MachineSetup."""
    join_timeout_s: float = JOIN_TIMEOUT_S
    log_dir: str | None = None
    shown: Shown = Shown()
    notes: tuple[str, ...] = ()
    """One sentence for each thing that is not as under torchrun."""


def endpoint_of(flags: RunFlags) -> Address | None:
    """The endpoint of a job of several hosts; None for a job of this host alone."""
    if flags.local_machines is not None or flags.standalone:
        return None
    if flags.rdzv_endpoint:
        port = STATIC_PORT if flags.rdzv_backend == "static" else C10D_PORT
        return _address(flags.rdzv_endpoint, port)
    asked = "--master-addr" in flags.given or "--master-port" in flags.given
    if not asked and _nnodes(flags) == 1:
        return None
    if flags.rdzv_backend != "static" and not asked:
        return Address(host="localhost", port=C10D_PORT)
    port = STATIC_PORT if flags.master_port is None else flags.master_port
    return Address(host=flags.master_addr.strip("[]"), port=_port(port, "--master-port"))


def plan(flags: RunFlags, facts: HostFacts) -> Plan:
    """What this call asks for. UserError, with one sentence, if it cannot be done as asked."""
    _check(flags)
    endpoint = endpoint_of(flags)
    nnodes = _machines(flags)
    alone = endpoint is None or nnodes == 1
    address = endpoint or Address(host="127.0.0.1", port=0)
    conf, notes = _rdzv_conf(flags)
    if not alone and address.port == 0:
        raise UserError(
            f"Port 0 in {flags.rdzv_endpoint} means any free port, and {nnodes} machines could not "
            "find it: name a port."
        )
    name, chosen = _name(flags, facts, address, alone=alone)
    return Plan(
        spec=_spec(flags, facts, name=name, nnodes=nnodes, local=alone),
        state_dir=facts.state_dir,
        chosen=chosen,
        leads=Leads.MUST if alone else _leads(flags, facts, conf),
        joins=not alone,
        address=address if not alone else Address(host="127.0.0.1", port=address.port),
        node_rank=flags.node_rank,
        local_addr=flags.local_addr,
        units=() if alone else _units(flags, facts),
        join_timeout_s=_seconds(conf.get("join_timeout")),
        log_dir=flags.log_dir,
        shown=_shown(flags),
        notes=(
            *flags.notes,
            *notes,
            *_unit_notes(flags, alone=alone),
            *_source_notes(flags),
        ),
    )


def _check(flags: RunFlags) -> None:
    """Refuse combinations and sizes that no job can have."""
    if flags.module and flags.no_python:
        raise UserError(
            "--module names Python code and --no-python says there is none: give one of the two."
        )
    if flags.local_machines is not None and flags.local_machines < 1:
        raise UserError(f"--local-machines {flags.local_machines}: a job needs at least 1.")
    if flags.local_machines is not None and (flags.node_rank is not None or flags.rdzv_endpoint):
        raise UserError(
            "--local-machines starts all machines on this host: leave out --node-rank and "
            "--rdzv-endpoint, which are for one machine of several hosts."
        )
    for name, value in (
        ("--standbys", _standbys(flags)),
        ("--backup-rate", flags.backup_rate),
        ("--max-restarts", flags.max_restarts or 0),
    ):
        if value < 0:
            raise UserError(f"{name} {value} is negative: give 0 or more.")
    if flags.backup_every < 1:
        raise UserError(f"--backup-every {flags.backup_every}: give 1 or more, or --no-backup.")
    if flags.rdzv_backend not in ("static", "c10d"):
        raise UserError(
            f"--rdzv-backend {flags.rdzv_backend} needs a server that everstep does not: leave the "
            "flag out, or give static or c10d."
        )


def _spec(flags: RunFlags, facts: HostFacts, *, name: JobId, nnodes: int, local: bool) -> JobSpec:
    nproc = _nproc(flags, facts)
    if flags.node_rank is not None and not 0 <= flags.node_rank < nnodes:
        raise UserError(
            f"--node-rank {flags.node_rank} is not a position among {nnodes} machines: give 0 to "
            f"{nnodes - 1}; positions count machines, not ranks."
        )
    spec = JobSpec(
        job=name,
        uid=facts.uid,
        command=(flags.script, *flags.script_args),
        module=flags.module,
        no_python=flags.no_python and not flags.run_path,
        no_fork=flags.no_fork,
        preload=flags.preload,
        working_dir=facts.working_dir,
        nnodes=nnodes,
        nproc_per_node=nproc,
        standbys=_standbys(flags),
        auto_standbys=flags.standbys == AUTO,
        local=local,
        env=_rank_environment(flags, name),
        checkpoint=CheckpointSpec(
            directory=_checkpoint_dir(flags, facts, name),
            disk_every=read_every(flags.disk_every, "--disk-every"),
            local_directory=_local_directory(flags, facts),
            local_disk_every=read_every(flags.local_disk_every, "--local-disk-every"),
            backup=not flags.no_backup,
            backup_every=flags.backup_every,
            backup_bytes_per_s=float(flags.backup_rate << 20),
            backup_interface=flags.backup_interface,
        ),
        policy=read_policy(flags),
        checks=_checks(flags, facts),
        layout=None if flags.layout is None else read_layout(flags.layout, nnodes, nproc),
        elastic=read_elastic(flags),
        code=code_of(flags, facts),
    )
    check_elastic(spec)
    return spec


def code_of(flags: RunFlags, facts: HostFacts) -> CodeSpec:
    """Which directories are versioned. None lies within another: it is part of that one."""
    if flags.no_python and not flags.run_path:
        return CodeSpec(why_none="the program is no Python code (--no-python)")
    outer = [
        root
        for root in dict.fromkeys(facts.source_roots)
        if not any(_lies_in(root, other) for other in facts.source_roots if other != root)
    ]
    if not facts.script_root:
        return CodeSpec(roots=tuple(outer))
    first = next((root for root in outer if _lies_in(facts.script_root, root)), facts.script_root)
    further = [root for root in outer if not _lies_in(root, first)]
    return CodeSpec(roots=(first, *further))


def _lies_in(path: str, directory: str) -> bool:
    return Path(path).is_relative_to(directory)


def _checks(flags: RunFlags, facts: HostFacts) -> ChecksSpec:
    make_checks(facts.check_limits)  # UserError if one of them is not a limit of a check
    return ChecksSpec(
        on=not flags.no_checks,
        limits=facts.check_limits,
        metrics_port=_port(flags.metrics_port, "--metrics-port"),
    )


def _units(flags: RunFlags, facts: HostFacts) -> tuple[str, ...]:
    """What the user says, and of other kinds what the scheduler says."""
    said: dict[str, list[str]] = {}
    for unit in flags.unit:
        if not is_unit(unit):
            raise UserError(f"--unit {unit} is not of the form KIND:NAME, as in switch:leaf7.")
        said.setdefault(unit.partition(":")[0], []).append(unit)
    for unit in facts.units:
        said.setdefault(unit.partition(":")[0], [unit])
    return tuple(unit for units in said.values() for unit in units)


def is_unit(text: str) -> bool:
    """Whether this is KIND:NAME."""
    return _UNIT.fullmatch(text) is not None


def _unit_notes(flags: RunFlags, *, alone: bool) -> list[str]:
    if not flags.unit or not alone:
        return []
    return ["--unit is ignored: all machines are this host."]


def _source_notes(flags: RunFlags) -> list[str]:
    if not flags.source_root or not flags.no_python or flags.run_path:
        return []
    return ["--source-root is ignored: the program is no Python code (--no-python)."]


def read_layout(text: str, nnodes: int, nproc: int) -> LayoutSpec:
    """The layout that --layout describes. Raises UserError if it is not that of these ranks."""
    spec = layout_spec(text)
    layout = layout_of(spec, nproc)
    if layout.world_size != nnodes * nproc:
        raise UserError(
            f"--layout {text}: tp*cp*dp*pp is {layout.world_size}, but the job has"
            f" {nnodes} machines of {nproc} ranks, {nnodes * nproc} in all."
        )
    return spec


def read_every(text: str, flag: str) -> Every:
    """Steps ("100"), or a time ("90s", "10m", "2h"); 0 of anything: never. Raises UserError."""
    match = re.fullmatch(r"(\d+)([smh]?)", text)
    if match is None:
        raise UserError(
            f"{flag} {text} is neither a number of steps nor a time: write 100, 90s, 10m or 2h, or "
            "0 for never."
        )
    if match[2]:
        return Every(seconds=float(match[1]) * _UNITS_S[match[2]])
    return Every(steps=int(match[1]))


def _local_directory(flags: RunFlags, facts: HostFacts) -> str:
    directory = flags.local_checkpoint_dir or ""
    if is_url(directory):
        raise UserError(
            f"--local-checkpoint-dir {directory} is a URL: it is for the machine's own disk; "
            "--checkpoint-dir takes one."
        )
    return directory and str(Path(facts.working_dir) / directory.removeprefix(FILE))


def _checkpoint_dir(flags: RunFlags, facts: HostFacts, name: JobId) -> str:
    """A URL for fsspec as it is, if its store's package is here; a path made absolute."""
    directory = flags.checkpoint_dir or str(Path(facts.state_dir) / name / "checkpoints")
    if not is_url(directory):
        return str(Path(facts.working_dir) / directory.removeprefix(FILE))
    try:
        tier_at(directory)
    except TierFailed as error:
        raise UserError(f"--checkpoint-dir: {error}") from error
    return directory


def _rank_environment(flags: RunFlags, name: JobId) -> dict[str, str]:
    """torchrun's variables whose value a flag chooses."""
    found = {}
    if flags.role != "default":
        found["ROLE_NAME"] = flags.role
    if flags.rdzv_id not in ("none", name):
        found["TORCHELASTIC_RUN_ID"] = flags.rdzv_id
    return found


def _nnodes(flags: RunFlags) -> int:
    low, _, high = flags.nnodes.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or int(low) < 1:
        raise UserError(
            f"--nnodes {flags.nnodes} is not a number of machines: give N, 1 or more (or N:N)."
        )
    if high and int(high) != int(low):
        raise UserError(
            f"--nnodes {flags.nnodes} asks for a job that changes its size, which is not supported "
            f"yet: give --nnodes {low}, or --nnodes {high}, and --standbys for spare machines."
        )
    return int(low)


def _machines(flags: RunFlags) -> int:
    nnodes = _nnodes(flags)
    if flags.local_machines is None:
        if flags.standalone and nnodes != 1:
            raise UserError(f"--standalone is one machine, and --nnodes says {nnodes}.")
        return nnodes
    if "--nnodes" in flags.given and nnodes != flags.local_machines:
        raise UserError(
            f"--nnodes {nnodes} and --local-machines {flags.local_machines} differ: leave out "
            "--nnodes."
        )
    return flags.local_machines


def _nproc(flags: RunFlags, facts: HostFacts) -> int:
    asked = flags.nproc_per_node
    if asked == "cpu" or (asked == "auto" and facts.gpus == 0):
        return facts.cpus
    if asked == "gpu" and facts.gpus == 0:
        raise UserError(
            "--nproc-per-node gpu: there is no NVIDIA GPU here (no /dev/nvidia0, or "
            "CUDA_VISIBLE_DEVICES hides it): give a number."
        )
    if asked in ("gpu", "auto"):
        return facts.gpus
    if not asked.isdecimal() or int(asked) < 1:
        raise UserError(
            f"--nproc-per-node {asked} is not a number of ranks: give 1 or more, auto, cpu or gpu."
        )
    return int(asked)


def _standbys(flags: RunFlags) -> int:
    """The number that was given; how many are kept beyond it is the core's matter."""
    if flags.standbys == AUTO:
        return 0
    try:
        return int(flags.standbys)
    except ValueError:
        raise UserError(
            f"--standbys {flags.standbys} is not a whole number: give one, or auto."
        ) from None


def _name(
    flags: RunFlags, facts: HostFacts, address: Address, *, alone: bool
) -> tuple[JobId, bool]:
    """The job's name, and whether the user gave it."""
    asked = flags.job or ("" if flags.rdzv_id == "none" else flags.rdzv_id)
    if asked:
        if not _NAME.fullmatch(asked):
            flag = "--job" if flags.job else "--rdzv-id"
            raise UserError(
                f"{flag} {asked!r} cannot be the name of a directory: use letters, digits, '.', "
                "'_' and '-', 48 at most, and begin with a letter or a digit."
            )
        return JobId(asked), True
    script = flags.script.rpartition(".")[2] if flags.module else Path(flags.script).stem
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", script).strip("-._")[:32] or "job"
    # On several hosts the name must come out the same everywhere; on one it should be fresh.
    return JobId(f"{stem}-{facts.uid[:4] if alone else address.port}"), False


def _leads(flags: RunFlags, facts: HostFacts, conf: dict[str, str]) -> Leads:
    said = conf.get("is_host", "").lower()
    if said in _TRUE:
        return Leads.MUST
    if said in _FALSE:
        return Leads.NO
    if flags.rdzv_backend == "static" and flags.node_rank is not None:
        return Leads.MUST if flags.node_rank == 0 else Leads.NO
    return Leads.MAY if facts.endpoint_here else Leads.NO


def _rdzv_conf(flags: RunFlags) -> tuple[dict[str, str], list[str]]:
    """The keys that mean something here, and a note for each that does not."""
    found: dict[str, str] = {}
    notes = []
    for pair in filter(None, flags.rdzv_conf.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not key or not equals:
            raise UserError(f"--rdzv-conf {flags.rdzv_conf} is not KEY=VALUE,KEY=VALUE.")
        if key not in _RDZV_KEYS:
            notes.append(f"--rdzv-conf {key} is ignored: there is no such rendezvous to tune.")
        found[key] = value
    if found.get("is_host", "1").lower() not in _TRUE + _FALSE:
        raise UserError(f"--rdzv-conf is_host={found['is_host']} is not 1 or 0.")
    return found, notes


def _seconds(text: str | None) -> float:
    if text is None:
        return JOIN_TIMEOUT_S
    if not text.isdecimal():
        raise UserError(f"--rdzv-conf join_timeout={text} is not a whole number of seconds.")
    return float(text)


def _shown(flags: RunFlags) -> Shown:
    only = _ranks(flags.local_ranks_filter)
    hide_all, hidden = _redirected(flags.redirects)
    return Shown(only=only, hidden=hidden, hide_all=hide_all)


def _ranks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--local-ranks-filter {text} is not a list of local ranks, as 0,1,2.")
    return tuple(int(part) for part in parts)


def _redirected(text: str) -> tuple[bool, tuple[int, ...]]:
    """Whether all local ranks stay off the terminal, and which do."""
    hidden = []
    for part in text.split(","):
        rank, colon, streams = part.rpartition(":")
        if streams in ("1", "2"):
            raise UserError(
                f"--redirects {text}: a rank's standard output and error are one file here, so "
                "only 0 (none) and 3 (both) can be meant."
            )
        if streams not in ("0", _STREAMS_BOTH) or (colon and not rank.isdecimal()):
            raise UserError(f"--redirects {text} is neither 0 or 3 nor a list RANK:3,RANK:3.")
        if not colon:
            return streams == _STREAMS_BOTH, ()
        if streams == _STREAMS_BOTH:
            hidden.append(int(rank))
    return False, tuple(hidden)


def _address(text: str, default_port: int) -> Address:
    """HOST, HOST:PORT, [V6] or [V6]:PORT."""
    match = re.fullmatch(r"(\[(?P<v6>[^\]]+)\]|(?P<name>[^:\[\]]+))(:(?P<port>\d+))?", text)
    if match is None:
        raise UserError(f"--rdzv-endpoint {text} is not of the form HOST:PORT.")
    port = int(match["port"]) if match["port"] else default_port
    return Address(host=match["v6"] or match["name"], port=_port(port, "--rdzv-endpoint"))


def _port(port: int, flag: str) -> int:
    if not 0 <= port <= 65535:
        raise UserError(f"{flag}: {port} is not a port: give 1 to 65535.")
    return port
