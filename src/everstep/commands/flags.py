"""The flags of `everstep run`, as data: all of torchrun's, and ours.

One table gives the parser, the sentences on what is ignored or refused, and the page
docs/torchrun-flags.md (a test says when that is stale, another when torch has a flag more). The
parser is argparse, as torchrun's is, so abbreviations and "everything after the script belongs to
the script" behave the same. Nothing here looks at the machine; plan.py decides what the flags mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn

import msgspec

from everstep.model import UserError, Value


class Kept(StrEnum):
    """What becomes of a flag."""

    SAME = "same"
    IGNORED = "ignored"
    REFUSED = "refused"
    OURS = "ours"


class Flag(Value, frozen=True, kw_only=True):
    """One flag: how it is spelt and what everstep makes of it."""

    names: tuple[str, ...]
    """Short name first if there is one; the spelling with underscores is accepted besides."""
    kept: Kept
    note: str
    """SAME and OURS: what it does. IGNORED and REFUSED: why, and what to do instead."""
    value: str = ""
    """Name of its value in the help; empty for a switch."""
    many: bool = False
    """May be given several times."""

    @property
    def field(self) -> str:
        """Name in RunFlags."""
        return self.names[-1].lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        long = self.names[-1]
        other = "--" + long[2:].replace("-", "_")
        return self.names if other == long else (*self.names, other)


def _torchrun(kept: Kept, names: str, value: str, note: str) -> Flag:
    return Flag(names=tuple(names.split()), kept=kept, value=value, note=note)


def _ours(name: str, value: str, note: str, *, many: bool = False) -> Flag:
    return Flag(names=(name,), kept=Kept.OURS, value=value, note=note, many=many)


_SIZES = (
    _torchrun(
        Kept.SAME,
        "--nnodes",
        "N",
        "Machines of the job. MIN:MAX with MIN = MAX is the same number; a real range is refused: "
        "spare machines are --standbys, and a job that may run with fewer says --elastic-dp.",
    ),
    _torchrun(
        Kept.SAME,
        "--nproc-per-node",
        "N|auto|cpu|gpu",
        "Ranks per machine. gpu counts the device files of NVIDIA GPUs, or CUDA_VISIBLE_DEVICES, "
        "and never starts CUDA; auto is gpu where there are some, else cpu; xpu and other "
        "accelerators: give the number.",
    ),
    _torchrun(
        Kept.SAME,
        "--node-rank",
        "I",
        "Position of this machine, 0 to N-1. Without it positions are given as machines join. "
        "With the static rendezvous, the machine of position 0 starts the controller.",
    ),
)

_RENDEZVOUS = (
    _torchrun(
        Kept.SAME,
        "--rdzv-backend",
        "static|c10d",
        "Both mean: the controller listens at the endpoint. etcd and other backends are refused; "
        "nothing needs a server of its own here.",
    ),
    _torchrun(
        Kept.SAME,
        "--rdzv-endpoint",
        "HOST[:PORT]",
        "Where the controller listens; the machine whose address it is starts it. Default port "
        "29400, torchrun's. The ranks' own store gets a fresh port for every generation.",
    ),
    _torchrun(
        Kept.SAME,
        "--rdzv-id",
        "ID",
        "Name of the job: equal on all its machines. Also TORCHELASTIC_RUN_ID.",
    ),
    _torchrun(
        Kept.SAME,
        "--rdzv-conf",
        "K=V,...",
        "Two keys are kept: is_host (this machine starts the controller or does not) and "
        "join_timeout (seconds to wait for the controller, default 600). The others tune a "
        "rendezvous that everstep does not have: ignored, with a note.",
    ),
    _torchrun(
        Kept.SAME,
        "--standalone",
        "",
        "One machine, this one; whatever --rdzv-* says is ignored.",
    ),
    _torchrun(
        Kept.SAME,
        "--master-addr",
        "HOST",
        "Host of --rdzv-endpoint when that is not given. In the ranks, MASTER_ADDR is the address "
        "of the machine that has rank 0.",
    ),
    _torchrun(
        Kept.SAME,
        "--master-port",
        "PORT",
        "Port of --rdzv-endpoint when that is not given, default 29500. In the ranks, MASTER_PORT "
        "is a fresh port for every generation.",
    ),
    _torchrun(
        Kept.SAME,
        "--local-addr",
        "ADDR",
        "Address under which the other machines reach this one.",
    ),
)

_LAUNCH = (
    _torchrun(
        Kept.SAME,
        "--max-restarts",
        "N",
        "Restarts before the job gives up. everstep counts those without progress in 30 minutes, "
        "and its default is 3 where torchrun's is 0.",
    ),
    _torchrun(Kept.SAME, "-m --module", "", "The script is the name of a module, as `python -m`."),
    _torchrun(
        Kept.SAME,
        "--no-python",
        "",
        "The script is a program of its own. It is started afresh: nothing is imported for it.",
    ),
    _torchrun(
        Kept.SAME,
        "--run-path",
        "",
        "Run the script in the interpreter that is there: what everstep does anyway. Wins over "
        "--no-python.",
    ),
    _torchrun(Kept.SAME, "--role", "NAME", "ROLE_NAME in the ranks. All ranks have one role."),
    _torchrun(
        Kept.IGNORED,
        "--start-method",
        "METHOD",
        "ranks are forked from a process that has imported torch and nothing of yours; "
        "--no-fork gives each a fresh interpreter",
    ),
    _torchrun(
        Kept.IGNORED,
        "--monitor-interval",
        "SECONDS",
        "the kernel tells everstep at once when a rank ends",
    ),
    _torchrun(
        Kept.IGNORED,
        "--event-log-handler",
        "NAME",
        "everything that happens is in the job's journal: see `everstep incidents` and `why`",
    ),
    _torchrun(
        Kept.IGNORED,
        "--shutdown-timeout",
        "SECONDS",
        "a restart ends ranks at once, since their checkpoints lie outside of them",
    ),
    _torchrun(
        Kept.IGNORED,
        "--signals-to-handle",
        "NAMES",
        "INT and TERM stop the job, HUP ends only what you see of it; no signal is passed on",
    ),
    _torchrun(
        Kept.IGNORED,
        "--numa-binding",
        "MODE",
        "ranks are not bound to cores yet: start the script under numactl with --no-python",
    ),
    _torchrun(
        Kept.REFUSED,
        "--virtual-local-rank",
        "",
        "LOCAL_RANK is always the position on the machine: use torch.device('cuda', LOCAL_RANK)",
    ),
    _torchrun(
        Kept.REFUSED,
        "--logs-specs",
        "NAME",
        "it names a class of torchrun's own logging, which is not there: use --redirects and "
        "--local-ranks-filter",
    ),
)

_OUTPUT = (
    _torchrun(
        Kept.SAME,
        "--log-dir",
        "DIR",
        "DIR/JOB becomes a link to the job's machines/ directory, where every rank's output is: "
        "machines/M/ranks/GENERATION/rank-R.log.",
    ),
    _torchrun(
        Kept.SAME,
        "-r --redirects",
        "0-3|RANK:N,...",
        "3 keeps a local rank's output off the terminal; its file has it in any case. 1 and 2 are "
        "refused: a rank's two streams are one file.",
    ),
    _torchrun(
        Kept.SAME,
        "-t --tee",
        "0-3|RANK:N,...",
        "Output always goes to both the terminal and a file. On the terminal each line begins "
        "with [rankN]: where torchrun has [ROLE LOCAL_RANK]:. Each host shows its own ranks; "
        "`everstep attach` shows all.",
    ),
    _torchrun(
        Kept.SAME,
        "--local-ranks-filter",
        "I,J,...",
        "Only these local ranks are shown on the terminal.",
    ),
    _torchrun(
        Kept.IGNORED,
        "--duplicate-stdout-filters",
        "WORDS",
        "search the ranks' files instead: `everstep status` names their directory",
    ),
    _torchrun(
        Kept.IGNORED,
        "--duplicate-stderr-filters",
        "WORDS",
        "search the ranks' files instead: `everstep status` names their directory",
    ),
)

_OURS = (
    _ours("--local-machines", "N", "N stand-ins for machines on this host, each with all parts."),
    _ours(
        "--standbys",
        "N|auto",
        "Spare machines beyond those that train (default 0). auto: as many as 99 days of 100 need, "
        "by how often machines of this job fail; at least 1.",
    ),
    _ours("--job", "NAME", "Name of the job; wins over --rdzv-id."),
    _ours("--state-dir", "DIR", "Where jobs are kept: $EVERSTEP_HOME, else ~/.everstep/jobs."),
    _ours(
        "--checkpoint-dir",
        "DIR",
        "Where the disk tier of the checkpoints lies, on a file system that all machines share, or "
        "a URL that fsspec knows (s3://..., hdfs://...; needs everstep[remote]). "
        "A job that finds published steps there goes on from the newest. Default: in the job's "
        "directory, so that a new job starts anew.",
    ),
    _ours(
        "--disk-every",
        "N|TIME",
        "Steps between two copies there, or time as 90s, 10m, 2h (default 100; 0: never).",
    ),
    _ours(
        "--local-checkpoint-dir",
        "DIR",
        "A directory on each machine's own disk, for copies of its own ranks' shards: they serve "
        "when all memory is lost at once. No file system is shared for it. Default: none.",
    ),
    _ours(
        "--local-disk-every",
        "N|TIME",
        "Steps between two copies to the machines' own disks, or time (default 10m).",
    ),
    _ours(
        "--no-backup",
        "",
        "Keep no copies of shards in the memory of peer machines: the loss of a machine costs the "
        "steps since the last copy to disk.",
    ),
    _ours("--backup-every", "N", "Fewest steps between two copies to peers (default 10)."),
    _ours(
        "--layout",
        "SIZES",
        "Sizes of the parallel dimensions, as tp=8,pp=4,dp=2 (also cp and ep), and if it is not "
        "Megatron's order=tp-cp-dp-pp, the order from the fastest to the slowest. Copies to peers "
        "then lie where the loss of any one group of machines leaves one.",
    ),
    _ours(
        "--elastic-dp",
        "MIN",
        "If machines are missing and none is coming, go on with fewer data-parallel replicas, at "
        "least MIN, and grow back when there are more. All replicas must hold the same state, as "
        "under DDP. Without --layout, every rank is a replica.",
    ),
    _ours(
        "--elastic-sharded",
        "",
        "The same where the state is sharded over the replicas (FSDP, ZeRO): it is then loaded "
        "from the newest step on disk, by way of torch.distributed.checkpoint.",
    ),
    _ours(
        "--backup-rate",
        "MIB",
        "Most MiB per second that one machine sends to peers (default 0: as many as bring a copy "
        "over in half the time until the next one).",
    ),
    _ours("--backup-interface", "NAME", "Network interface of each machine that they go over."),
    _ours(
        "--stall-limit",
        "MIN[:MAX]",
        "Shortest and longest time without a step after which the stacks of all ranks are looked "
        "at, as 30s or 30s:20m (default 10s:10m). In between, it follows the job's own pace.",
    ),
    _ours(
        "--no-hang-detection",
        "",
        "Never look into a job that stands still or became slower: a hang then lasts until "
        "somebody ends it. `everstep stacks` still works.",
    ),
    _ours("--no-checks", "", "Do not check machines while ranks train."),
    _ours(
        "--check-limits",
        "FILE",
        "TOML with other limits for checks, one table for each, as in [net.link]; `at_most = "
        '"warn"` lets a check only be watched, `off = true` turns it off.',
    ),
    _ours(
        "--metrics-port",
        "N",
        "Where each machine shows what its checks say to Prometheus, at /metrics (default 0: "
        "nowhere).",
    ),
    _ours(
        "--unit",
        "KIND:NAME",
        "What this machine shares with others and may lose with them, as switch:leaf7 or rack:12: "
        "machines that fail together are then sent away together. Under Slurm its topology says "
        "switch and block.",
        many=True,
    ),
    _ours("--no-fork", "", "Start every rank in a fresh interpreter: slower, but no fork."),
    _ours("--preload", "PKG", "Installed package to import before ranks are forked.", many=True),
    _ours(
        "--source-root",
        "DIR",
        "One more directory of your own code: with the script's own (of -m: the working directory) "
        "it makes the code version that `everstep update` changes. If the script's directory lies "
        "in DIR, all of DIR takes its place.",
        many=True,
    ),
    _ours("--detach", "", "Start the job and return; see `everstep attach`."),
    _ours("--dry-run", "", "Show what would be started, and start nothing."),
    _ours("--json", "", "The result as JSON on standard output, all else on standard error."),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Sizes": _SIZES,
    "Rendezvous": _RENDEZVOUS,
    "Launch": _LAUNCH,
    "Output": _OUTPUT,
    "everstep's own": _OURS,
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)


class RunFlags(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags of one call, parsed. None: not given. Meanings are in the table above."""

    nnodes: str = "1:1"
    nproc_per_node: str = "1"
    node_rank: int | None = None
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    standalone: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    local_addr: str | None = None
    max_restarts: int | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    role: str = "default"
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str = ""
    local_machines: int | None = None
    standbys: str = "0"
    job: str | None = None
    state_dir: str | None = None
    checkpoint_dir: str | None = None
    disk_every: str = "100"
    local_checkpoint_dir: str | None = None
    local_disk_every: str = "10m"
    no_backup: bool = False
    backup_every: int = 10
    backup_rate: int = 0
    backup_interface: str = ""
    layout: str | None = None
    elastic_dp: int | None = None
    elastic_sharded: bool = False
    stall_limit: str = ""
    no_hang_detection: bool = False
    no_checks: bool = False
    check_limits: str = ""
    metrics_port: int = 0
    unit: tuple[str, ...] = ()
    no_fork: bool = False
    preload: tuple[str, ...] = ()
    source_root: tuple[str, ...] = ()
    detach: bool = False
    dry_run: bool = False
    json: bool = False
    script: str
    script_args: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    """Long names of torchrun's flags that the call has, in the table's order."""
    notes: tuple[str, ...] = ()
    """One sentence for each flag that is ignored."""


class HelpRequested(Exception):
    """The call has --help; the message is the text to print."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; `everstep run --help` lists all.")


def parse(argv: Sequence[str]) -> RunFlags:
    """Read the words after `everstep run`.

    Raises UserError for a flag that is unknown, wrong or refused, HelpRequested for --help.
    """
    parser = _parser()
    ours, scripts = _split(argv)
    found = vars(parser.parse_args(ours))
    found["script_args"] = scripts
    if found.pop("help", False):
        raise HelpRequested(parser.format_help())
    if not found.get("script"):
        raise UserError(
            "No script was given: everstep run [FLAGS] SCRIPT [ARGUMENTS OF THE SCRIPT]."
        )
    given = [flag for flag in FLAGS if flag.field in found]
    notes = []
    for flag in given:
        if flag.kept is Kept.REFUSED:
            raise UserError(f"{flag.names[-1]} is refused: {flag.note}.")
        if flag.kept is Kept.IGNORED:
            notes.append(f"{flag.names[-1]} is ignored: {flag.note}.")
            del found[flag.field]
    found["given"] = [flag.names[-1] for flag in given if flag.kept is not Kept.OURS]
    found["notes"] = notes
    return _convert(found)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, the script included, and the script's own.

    argparse would see abbreviations of our flags in the script's: its --log would be "ambiguous".
    """
    takes_value = {name: bool(flag.value) for flag in FLAGS for name in flag.spellings}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        name, equals, _ = argv[at].partition("=")
        meant = {takes_value[name]} if name in takes_value else set()
        meant = meant or {takes for flag, takes in takes_value.items() if flag.startswith(name)}
        at += 2 if meant == {True} and not equals else 1
    at += 2 if argv[at : at + 1] == ["--"] else 1
    return list(argv[:at]), list(argv[at:])


def pet_refusal(names: Sequence[str]) -> str | None:
    """The sentence about torchrun's variables PET_FLAG in the environment, None if there are none.

    torchrun takes defaults from them. A flag on the command line can be seen; a variable that
    changes the size of a job cannot, so everstep asks for the flag.
    """
    known = {f"PET_{flag.field.upper()}": flag for flag in FLAGS if flag.kept is not Kept.OURS}
    present = sorted(name for name in names if name in known)
    if not present:
        return None
    advice = " ".join(f'{known[name].names[-1]} "${name}"' for name in present)
    return (
        f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, and everstep takes "
        f"flags from the command line only: write {advice}, and unset the variable."
    )


def reference_page() -> str:
    """The text of docs/torchrun-flags.md."""
    lines = [
        "# torchrun's flags under everstep",
        "",
        "<!-- Written by `make docs` from src/everstep/commands/flags.py: change that file. -->",
        "",
        "Change the word `torchrun` to `everstep run` and the rest of the command may stay. Every",
        "flag of torchrun 2.13 is here; spellings with underscores are accepted too. Variables",
        "`PET_...`, which torchrun takes as defaults of flags, are refused with the flag to write.",
        "",
    ]
    for title, flags in GROUPS.items():
        ours = title == "everstep's own"
        lines += [f"## {title}", "", "| flag | what it does |" if ours else _HEAD]
        lines += ["|---|---|" if ours else "|---|---|---|"]
        lines += [_row(flag) for flag in flags] + [""]
    return "\n".join(lines)


_HEAD = "| flag | here | what it does, or why not |"


def _row(flag: Flag) -> str:
    spelling = ", ".join(f"`{name}`" for name in flag.names)
    value = f" `{flag.value}`".replace("|", "\\|") if flag.value else ""
    whole = flag.note.endswith(".")
    note = flag.note if whole else f"{flag.note[:1].upper()}{flag.note[1:]}."
    kept = "" if flag.kept is Kept.OURS else f" {flag.kept} |"
    return f"| {spelling}{value} |{kept} {note} |"


def _parser() -> _Parser:
    parser = _Parser(
        prog="everstep run",
        usage="everstep run [FLAGS] SCRIPT [ARGUMENTS OF THE SCRIPT]",
        description="Run a training script on several machines and keep it running.",
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show this text.")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            group.add_argument(*flag.spellings, **_argument(flag))
    parser.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    return parser


def _argument(flag: Flag) -> dict[str, Any]:
    known = flag.note if flag.kept in (Kept.SAME, Kept.OURS) else f"{flag.kept}: {flag.note}."
    argument: dict[str, Any] = {"dest": flag.field, "help": known.replace("%", "%%")}
    if not flag.value:
        return {**argument, "action": "store_true"}
    return {**argument, "metavar": flag.value, "action": "append" if flag.many else "store"}


def _convert(found: dict[str, Any]) -> RunFlags:
    try:
        return msgspec.convert(found, RunFlags, strict=False)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].rstrip("`")
        name = f"--{field.replace('_', '-')}"
        value = found.get(field)
        raise UserError(f"{name} {value} is not a whole number: give one.") from error
