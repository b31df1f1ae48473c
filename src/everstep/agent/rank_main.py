"""The last thing of ours in a training process: it becomes a rank, then runs the user's program.

agent/launcher.py calls `become_rank` in a fresh fork and `run_program` once its own frames are
gone; with --no-fork a fresh interpreter runs this module. From the user's first line on, the
process must be what `python SCRIPT` would have made of it: same __main__, sys.argv, sys.path,
tracebacks, exit codes, threads and atexit handlers. Nothing here may touch CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import io
import json
import multiprocessing.process
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NamedTuple

import msgspec

from everstep.agent import placing
from everstep.agent.fork import Forked, ForkRequest, RankPlan
from everstep.agent.placing import Places
from everstep.agent.store import await_store
from everstep.processes import identify
from everstep.trainer import dumping, traced
from everstep.trainer.context import VARIABLE, AttachContext
from everstep.trainer.heartbeat import Heartbeat, SlotWriter

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path where torch's @record, or this module, writes the error."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Program(NamedTuple):
    """What the user wants run."""

    command: tuple[str, ...]
    """Script (or module name) and arguments."""
    module: bool
    places: Places = ()
    """Where its code version lies, if not in its source roots."""


# --- from a fork of the launcher to a rank -------------------------------------------------------


def become_rank(request: ForkRequest, plan: RankPlan, env: dict[str, str]) -> Forked:
    """Turn this fresh fork into the rank: session, identity, signals, files, environment.

    The caller has closed what it inherited. OSError if a file or the working directory fails.
    """
    os.setsid()
    traced.let_be_traced()  # also if another program replaces this one
    forked = _write_identity(request, plan)
    reset_signals()
    _redirect_output(plan.log)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request.working_dir)
    placing.move_pythonpath(request.places)
    return forked


def start_program(request: ForkRequest) -> Program:
    """What the rank does next: run a program here, or be replaced by another one."""
    if request.no_python:
        os.execvp(request.command[0], request.command)
    if request.no_fork:
        if request.places:
            os.environ[placing.PLACED] = placing.packed(request.places)
        fresh = [sys.executable, "-P", "-m", __name__, *(["-m"] if request.module else [])]
        os.execv(sys.executable, [*fresh, *request.command])
    _reseed()
    _set_threads()
    await_store()
    # The launcher may have been somewhere else when it imported multiprocessing.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    return Program(request.command, request.module, request.places)


def _write_identity(request: ForkRequest, plan: RankPlan) -> Forked:
    """First of all, so that an agent that was just restarted knows this process."""
    me = identify(os.getpid())
    assert me is not None, "this process runs"
    beat = Heartbeat(
        generation=request.generation, rank=plan.rank, pid=me.pid, start_ticks=me.start_ticks
    )
    slot = SlotWriter(Path(request.heartbeat), plan.slot)
    slot.write(beat)
    slot.close()
    return Forked(rank=plan.rank, pid=me.pid, start_ticks=me.start_ticks)


def reset_signals() -> None:
    """As in a new interpreter, whatever the launcher's packages installed."""
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        handler = signal.SIG_IGN if number in _IGNORED_BY_PYTHON else signal.SIG_DFL
        signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect_output(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)


def _reseed() -> None:
    """What a new process would have drawn by itself (random does so at every fork)."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)


def _set_threads() -> None:
    """Libraries read these variables when they were loaded, in the launcher: tell them again."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))
    wanted = os.environ.get("OPENBLAS_NUM_THREADS") or wanted or str(os.cpu_count())
    if "numpy" in sys.modules and wanted.isdecimal() and int(wanted) > 1:
        _set_openblas_threads(int(wanted))


def _set_openblas_threads(count: int) -> None:
    """The launcher kept OpenBLAS to one thread; undo that in whatever build of it is loaded."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    for library in {line.split()[-1] for line in maps.splitlines() if "openblas" in line}:
        loaded = ctypes.CDLL(library)
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                name = f"{prefix}openblas_set_num_threads{suffix}"
                if (function := getattr(loaded, name, None)) is not None:
                    function(count)
                    return


# --- the user's program --------------------------------------------------------------------------


def run_program(program: Program) -> None:
    """Run it as __main__. Returns or raises as it does; then let the interpreter end by itself."""
    reconfigure: Callable[..., None] | None = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # A log is read while it grows: by people, and after a kill.
        reconfigure(line_buffering=True)
    _show_stacks()
    program = _in_its_place(program)
    sys.orig_argv = [sys.executable, *(["-m"] if program.module else []), *program.command]
    main = new_main()
    try:
        if program.module:
            _run_module(program)
        else:
            _run_script(program, main)
    except SystemExit:
        raise
    except BaseException as error:
        _hide_our_frames(error)
        _write_error_file(error)
        raise


def _show_stacks() -> None:
    """To whoever may look, and to whoever asks where py-spy may not."""
    traced.let_be_traced()
    text = os.environ.get(VARIABLE)
    if text is not None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            context = msgspec.json.decode(text, type=AttachContext)
            dumping.register(Path(context.shm), context.local_rank)


def _in_its_place(program: Program) -> Program:
    """Have sys.path and the script's path point into the code version, if it is not in place."""
    places = program.places
    if not places:
        return program
    placing.forget_modules(places)
    sys.path[:] = placing.move_paths(sys.path, places)
    if program.module:
        return program
    script, *arguments = program.command
    return program._replace(command=(placing.moved(absolute(script), places), *arguments))


def absolute(script: str) -> str:
    """Its path as Python has it in __file__: not in its shortest form."""
    return script if script.startswith("/") else f"{os.getcwd()}/{script}"


def new_main() -> ModuleType:
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    vars(main).update(
        __builtins__=sys.modules["builtins"], __loader__=importlib.machinery.BuiltinImporter
    )
    sys.modules["__main__"] = main
    return main


def _run_module(program: Program) -> None:
    sys.argv = ["-m", *program.command[1:]]
    placing.put_in_front(placing.moved(os.getcwd(), program.places))
    # The function behind `python -m` itself: same messages, same frames in tracebacks.
    runpy._run_module_as_main(program.command[0])  # type: ignore[attr-defined]  # noqa: SLF001


def _run_script(program: Program, main: ModuleType) -> None:
    path = absolute(program.command[0])
    sys.argv = list(program.command)
    if pkgutil.get_importer(path) is not None:
        # A directory or zip file with a __main__.py.
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001
        return
    placing.put_in_front(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120 -- as python does
    vars(main).update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 -- to run the user's script is what we are for


def _hide_our_frames(error: BaseException) -> None:
    """Have the interpreter print the traceback that it would print without us.

    Raising adds our frames again on the way out, so the hook that prints cuts them off.
    """
    shown = _without_our_frames(error.__traceback__)
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if value is error:
            trace = shown
            value.__traceback__ = sys.last_traceback = shown
        hook(kind, value, trace)

    sys.excepthook = excepthook


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    ours = {run_program.__code__, _run_module.__code__, _run_script.__code__}
    while trace is not None and trace.tb_frame.f_code in ours:
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException) -> None:
    """torchelastic's format, unless the script's own @record has written it already."""
    path = os.environ.get(ERROR_FILE)
    if not path or Path(path).exists():
        return
    trace = _without_our_frames(error.__traceback__)
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    try:
        Path(path).write_text(json.dumps(content))
    except OSError as problem:
        print(f"everstep: cannot write {path}: {problem.strerror}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    _as_module = sys.argv[1] == "-m"
    _places = placing.unpacked(os.environ.pop(placing.PLACED, "[]"))
    run_program(Program(tuple(sys.argv[1 + _as_module :]), _as_module, _places))
