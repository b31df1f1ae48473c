"""The commands of `everstep`, and nothing else: each reads its flags and calls commands/.

The only file of the command line that reads the environment. `run` has torchrun's flags, which
commands/flags.py holds as data; the others have few, frozen by a test. What takes long to import
and few commands need is imported by these: an update waits for its command's start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from everstep import __version__
from everstep.commands import checkpoint, jobs, order, plugin, show, update
from everstep.commands import versions as history
from everstep.controller.code import RollBack
from everstep.model import ChecksSpec, EverstepError, Fault, UserError
from everstep.paths import JobPaths

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Keeps multi-machine PyTorch training running.",
)

Job = Annotated[
    str | None, typer.Argument(metavar="[JOB]", help="Default: the one that runs, or the newest.")
]
StateDir = Annotated[
    str | None,
    typer.Option("--state-dir", metavar="DIR", help="Default: $EVERSTEP_HOME, ~/.everstep/jobs."),
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON on standard output.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="DIR|URL", help="Where steps lie, instead of a job's."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show it, and do nothing.")]

steps = typer.Typer(no_args_is_help=True, help="Look at the steps that a job keeps on disk.")
app.add_typer(steps, name="checkpoint")


@app.command(
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
)
def run(context: typer.Context) -> None:
    """Run a training script; torchrun's flags mean what they mean there (run --help)."""
    # Taken away from the environment: ranks inherit that, and the token is none of their business.
    token = os.environ.pop(jobs.TOKEN_VARIABLE, None)
    from everstep.commands import launch  # noqa: PLC0415 -- see above

    raise typer.Exit(launch.run(context.args, os.environ, token))


@app.command()
def attach(job: Job = None, *, state_dir: StateDir = None, json: Json = False) -> None:
    """Look at a job as `everstep run` does: output, incidents, the table at the end."""
    from everstep.commands import launch  # noqa: PLC0415 -- see above

    raise typer.Exit(launch.attach(_job(job, state_dir), json=json))


@app.command()
def stop(job: Job = None, *, state_dir: StateDir = None, json: Json = False) -> None:
    """End a job: ranks get SIGTERM and a few seconds, then all of it goes."""
    order.stop(_job(job, state_dir), json=json)


@app.command()
def agent(
    job: Job = None,
    *,
    node_rank: Annotated[int | None, typer.Option(help="Position in the job.")] = None,
    local_addr: Annotated[str | None, typer.Option(help="How others reach this host.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Join a job as one more machine, in the foreground; its directory must be shared."""
    from everstep.commands import foreground  # noqa: PLC0415 -- see above

    foreground.agent(_job(job, state_dir), node_rank=node_rank, local_addr=local_addr)


@app.command()
def controller(
    job: Job = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the journal.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="In the background.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Bring the controller of a job back, in the foreground; ranks notice nothing."""
    from everstep.commands import foreground  # noqa: PLC0415 -- see above

    foreground.controller(_job(job, state_dir), resume=resume, detach=detach)


@app.command()
def status(job: Job = None, *, state_dir: StateDir = None, json: Json = False) -> None:
    """Show where a job is: step, machines, time account."""
    show.status(_job(job, state_dir), json=json)


@app.command()
def incidents(job: Job = None, *, state_dir: StateDir = None, json: Json = False) -> None:
    """Show what went wrong so far, and the seconds that it cost."""
    show.incidents(_job(job, state_dir), json=json)


@app.command()
def why(
    subject: Annotated[str, typer.Argument(metavar="ID", help="Incident, decision or machine.")],
    job: Job = None,
    *,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Tell how it came to a decision: the facts and decisions behind it, oldest first."""
    show.why(_job(job, state_dir), subject, json=json)


class UpdateFlags(NamedTuple):
    """Flags of `everstep update`."""

    source: Annotated[
        str,
        typer.Argument(metavar="DIR|GIT-REF", help="New code: a directory, or a commit or branch."),
    ]
    job: Job = None
    urgent: Annotated[
        bool, typer.Option("--urgent", help="Stop ranks for it as soon as it is ready (default).")
    ] = False
    lazy: Annotated[
        bool,
        typer.Option("--lazy", help="Wait for the next restart, but not longer than --within."),
    ] = False
    within: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Of a lazy one: 90s, 30m, 24h, 2d; default 24h."),
    ] = None
    note: Annotated[str, typer.Option(metavar="TEXT", help="What it is for.")] = ""
    overlap: Annotated[
        int, typer.Option(metavar="N", min=0, help="Do N steps again and compare their losses.")
    ] = 0
    root: Annotated[
        list[str] | None,
        typer.Option("--root", metavar="N=DIR", help="A further source root; others stay."),
    ] = None
    exact: Annotated[
        bool, typer.Option("--exact", help="Put it in place as it is: merge nothing.")
    ] = False
    again: Annotated[
        bool, typer.Option("--again", help="Although it is exactly what was rolled back.")
    ] = False
    untried: Annotated[
        bool, typer.Option("--untried", help="Although no machine has imported it.")
    ] = False
    dry_run: DryRun = False
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return when the controller has accepted it.")
    ] = False
    state_dir: StateDir = None
    json: Json = False


@app.command(name="update")
@plugin.takes(UpdateFlags)
def update_code(flags: UpdateFlags) -> None:
    """Change the code of a job that runs; machines and launchers stay."""
    if flags.urgent and flags.lazy:
        raise UserError("An update is urgent or lazy: give one of --urgent and --lazy.")
    wanted = update.Wanted(
        what=flags.source,
        others=tuple(flags.root or ()),
        lazy=flags.lazy,
        within=flags.within,
        note=flags.note,
        overlap=flags.overlap,
        exact=flags.exact,
        again=flags.again,
        untried=flags.untried,
        dry_run=flags.dry_run,
        wait=not flags.no_wait,
        json=flags.json,
    )
    raise typer.Exit(update.update(_job(flags.job, flags.state_dir), wanted))


@app.command()
def rollback(
    job: Job = None,
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="VERSION", help="v2, say; default: the last good one.")
    ] = "",
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why.")] = "",
    dry_run: DryRun = False,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Bring an earlier version of a job's code back."""
    asked = RollBack(by=update.who(), note=note, to=to, dry_run=dry_run)
    raise typer.Exit(update.rollback(_job(job, state_dir), asked, json=json))


@app.command()
def versions(job: Job = None, *, state_dir: StateDir = None, json: Json = False) -> None:
    """Show which code a job ran, from whom, and what became of it."""
    history.versions(_job(job, state_dir), json=json)


@app.command()
def inject(
    fault: Annotated[Fault, typer.Argument(help="What to break.")],
    job: Job = None,
    *,
    rank: Annotated[int | None, typer.Option(help="Which rank; default: any.")] = None,
    machine: Annotated[str | None, typer.Option(help="Which machine; default: any.")] = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Break something of a running job on purpose."""
    order.inject(_job(job, state_dir), fault, rank=rank, machine=machine, json=json)


@app.command()
def clean(
    job: Job = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every job.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Its directory too.")] = False,
    dry_run: DryRun = False,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """End every process of a job on this host, remove its shared memory; its records stay.

    With --all, jobs that are under control of a living controller are left alone.
    """
    if everything == (job is not None):
        raise UserError("Name a job, or say --all: clean ends what it finds.")
    what = order.Cleaning(forget=forget, dry_run=dry_run)
    if everything:
        order.clean_all(jobs.all_jobs(jobs.state_dir(state_dir, os.environ)), what, json=json)
    else:
        order.clean([_job(job, state_dir)], what, json=json)


@steps.command(name="list")
def list_steps(
    job: Job = None, *, source: From = None, state_dir: StateDir = None, json: Json = False
) -> None:
    """Show the published steps, oldest first."""
    checkpoint.list_steps(_checkpoints(job, source, state_dir), json=json)


@steps.command()
def verify(
    job: Job = None,
    *,
    step: Annotated[str | None, typer.Option(help="Only this one; or newest.")] = None,
    source: From = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Read every shard and compare checksums; exit code 1 if any is damaged or missing."""
    directory = _checkpoints(job, source, state_dir)
    raise typer.Exit(checkpoint.verify(directory, step, json=json))


@steps.command()
def export(
    step: Annotated[str, typer.Argument(metavar="STEP", help="A number, or newest.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="To be made.")],
    job: Job = None,
    *,
    source: From = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Write a step as a directory that torch.distributed.checkpoint loads without everstep."""
    checkpoint.export(_checkpoints(job, source, state_dir), step, target, json=json)


@app.command()
def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Logs, dumps, directories; - reads stdin."),
    ],
    *,
    layout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What is known of the job, as JSON.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules of your site, as TOML.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what broke, and who, from the files of any failed job."""
    from everstep.commands import diagnose as failures  # noqa: PLC0415 -- see above

    failures.diagnose(paths, layout=layout, extra=rules, json=json)


class StacksFlags(NamedTuple):
    """Flags of `everstep stacks`."""

    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB|DUMP...]",
            help="What exists as a file or directory is a dump (- reads stdin), other words are "
            "jobs. Default: the job that runs, or the newest.",
        ),
    ] = None
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="A job, whatever files there are.")
    ] = None
    last: Annotated[
        bool, typer.Option("--last", help="Show the newest look, of the last hang, say; take none.")
    ] = False
    layout: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Of the job of the dumps: tp=8,pp=4,dp=2.")
    ] = None
    nproc_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks per machine in the job of the dumps.")
    ] = None
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Every thread, not the main one alone.")
    ] = False
    full: Annotated[bool, typer.Option("--full", help="Every cluster, and whole stacks.")] = False
    state_dir: StateDir = None
    json: Json = False


@app.command(name="stacks")
@plugin.takes(StacksFlags)
def show_stacks(flags: StacksFlags) -> None:
    """Show what all ranks do now, those that do the same together; nothing is stopped.

    With files or directories: the same of stack dumps and flight records of any job.
    """
    from everstep.commands import stack_tables, stacks  # noqa: PLC0415 -- see above

    words = flags.what or []
    how = stacks.Shown(stack_tables.Wanted(flags.all_threads, flags.full), flags.json)
    if stacks.dumps_of(words, flags.job):
        if flags.last:
            raise UserError("--last is for the looks of a job: leave it out for dumps.")
        stacks.of_dumps(words, flags.layout, flags.nproc_per_node, how)
        return
    if flags.layout is not None or flags.nproc_per_node is not None:
        raise UserError("A job knows its layout: --layout and --nproc-per-node are for dumps.")
    name = flags.job if not words else words[0]
    stacks.of_job(_job(name, flags.state_dir), last=flags.last, how=how)


class CheckFlags(NamedTuple):
    """Flags of `everstep check`; --group is for --serve alone."""

    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this check, or those below net. and so on."),
    ] = None
    limits: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Thresholds of your site, as TOML.")
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", readable=False, help="Where samples are kept between calls."),
    ] = None
    root: Annotated[
        str, typer.Option(metavar="DIR", help="Where /proc, /sys and /dev of the host are.")
    ] = "/"
    time_limit: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="For all checks together.")
    ] = plugin.TIME_LIMIT_S
    everything: Annotated[bool, typer.Option("--all", help="Show what passed, too.")] = False
    list_all: Annotated[bool, typer.Option("--list", help="Show all checks and limits.")] = False
    drain: Annotated[
        bool, typer.Option("--drain", help="Drain this node in Slurm if it should get no work.")
    ] = False
    dry_run: DryRun = False
    json: Json = False
    serve: Annotated[
        bool, typer.Option("--serve", help="Be the node service: the kernel log for other users.")
    ] = False
    socket: Annotated[
        Path, typer.Option(metavar="PATH", readable=False, help="Where a node service listens.")
    ] = Path(ChecksSpec().node_socket)
    group: Annotated[
        str, typer.Option(metavar="NAME", help="Who may ask the node service; default: everybody.")
    ] = ""


@app.command(cls=plugin.Plugin)
@plugin.takes(CheckFlags)
def check(flags: CheckFlags) -> None:
    """Look at this machine once; exits with 0, 1, 2 or 3 as Nagios plugins do.

    0: all is well. 1: something should be looked at. 2: the machine should get no work. 3: it could
    not be told.
    """
    from everstep.commands import check as checks  # noqa: PLC0415 -- see above

    if flags.list_all:
        checks.show_list(json=flags.json)
        return
    if flags.serve:
        checks.serve(flags.socket, flags.group, flags.root)
        return
    asked = checks.Asked(
        only=flags.only or (),
        limits=flags.limits,
        state=flags.state,
        root=flags.root,
        socket=flags.socket,
        time_limit_s=flags.time_limit,
        json=flags.json,
        everything=flags.everything,
        drain=flags.drain,
        dry_run=flags.dry_run,
    )
    raise typer.Exit(plugin.answer(lambda: checks.check(asked, os.environ)))


@app.command()
def token(
    job: Job = None,
    *,
    findings: Annotated[
        bool, typer.Option("--findings", help="One that can only bring a monitor's findings.")
    ] = False,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Show the token of a job's controller, for those who may read it anyway."""
    show.token(_job(job, state_dir), findings=findings, json=json)


@app.command()
def version(*, json: Json = False) -> None:
    """Show the version of everstep."""
    if json:
        show.print_json({"everstep": __version__, "python": sys.version.split()[0]})
    else:
        sys.stdout.write(f"everstep {__version__}\n")


def main() -> None:
    """Entry point: every error of ours is one sentence and its exit code."""
    try:
        app()
    except EverstepError as error:
        sys.stderr.write(f"everstep: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        what = error.filename or "the operating system"
        sys.stderr.write(f"everstep: {what}: {error.strerror or error}.\n")
        sys.exit(1)


def _checkpoints(job: str | None, source: str | None, state: str | None) -> str:
    if source is None:
        return checkpoint.directory_of(_job(job, state))
    if job is not None:
        raise UserError("Name a job, or a checkpoint directory with --from, not both.")
    return source


def _job(name: str | None, state: str | None) -> JobPaths:
    return jobs.find(jobs.state_dir(state, os.environ), name)
