"""Promises of the launcher and of what it makes of a fork: a rank is what `python SCRIPT` would be.

One launcher (a real one under a real keeper) serves all tests of this module.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.agent import warm as warm_module
from everstep.agent.fork import ForkReply, ForkRequest, RankPlan
from everstep.model import Rank
from everstep.processes import identify
from everstep.trainer.heartbeat import SlotReader
from tests.agent.support import Job, Ran, ask_launcher, exit_status, is_running, wait_for

pytestmark = pytest.mark.torch


class Warm:
    """A warm launcher, and what one generation after the other did under it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.heartbeat = job.shm / "heartbeat"
        self.generation = 0
        job.shm.mkdir(parents=True, exist_ok=True)

    def request(self, *command: str, ranks: int = 1, **fields: Any) -> ForkRequest:
        self.generation += 1
        place = self.job.machine.ranks / str(self.generation)
        place.mkdir(parents=True)
        env = fields.pop("env", {})
        plans = tuple(
            RankPlan(
                rank=Rank(rank),
                slot=rank,
                env={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "TORCHELASTIC_ERROR_FILE": str(place / f"{rank}.json"),
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
                log=str(place / f"{rank}.log"),
            )
            for rank in range(ranks)
        )
        whole = {
            "module": False,
            "no_python": False,
            "no_fork": False,
            "working_dir": str(self.job.work),
            **fields,
        }
        return ForkRequest(
            generation=self.generation,
            command=command,
            heartbeat=str(self.heartbeat),
            ranks=plans,
            **whole,
        )

    def fork(self, request: ForkRequest) -> ForkReply:
        return ask_launcher(self.job.machine.launcher_socket, request)

    def run(self, *command: str, **fields: Any) -> list[Ran]:
        """Fork and wait for the end of all ranks."""
        request = self.request(*command, **fields)
        reply = self.fork(request)
        assert not reply.problem
        return [self.end_of(request, reply, index) for index in range(len(reply.ranks))]

    def end_of(self, request: ForkRequest, reply: ForkReply, rank: int) -> Ran:
        forked = next(each for each in reply.ranks if each.rank == rank)
        status = exit_status(self.job.machine.exits, forked.pid, forked.start_ticks)
        plan = request.ranks[rank]
        error = Path(plan.env["TORCHELASTIC_ERROR_FILE"])
        return Ran(
            code=os.waitstatus_to_exitcode(status),
            output=Path(plan.log).read_text(),
            error=json.loads(error.read_text()) if error.exists() else None,
        )

    def one(self, text: str, *arguments: str, **fields: Any) -> Ran:
        """Run this script on one rank."""
        self.job.script("script.py", text)
        return self.run("script.py", *arguments, **fields)[0]

    def start_python(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.job.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end_of_python(self, started: subprocess.Popen[str]) -> Ran:
        output, _ = started.communicate()
        return Ran(code=started.returncode, output=output, error=None)

    def python(self, *command: str) -> Ran:
        """The same under plain python, for comparison."""
        return self.end_of_python(self.start_python(*command))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    job = Job(tmp_path_factory.mktemp("launcher"), f"l{os.getpid()}")
    job.describe(["script.py"])
    job.start("launcher")
    yield Warm(job)
    job.stop()


# --- as python would -----------------------------------------------------------------------------

PRINT_MAIN = """
    import sys
    main = sys.modules["__main__"]
    assert vars(main) is globals()
    for name in sorted(vars(main)):
        if name not in ("main", "sys", "__loader__", "__builtins__"):
            print(name, vars(main)[name])
    print(type(__loader__).__name__, __loader__.name, __loader__.path, __builtins__)
    print(sys.argv, sys.orig_argv[1:], sys.path)
"""


@pytest.mark.parametrize("script", ["script.py", "./script.py", "sub/script.py", "ABSOLUTE"])
def test_a_script_sees_what_it_sees_under_python(warm: Warm, script: str) -> None:
    script = str(warm.job.work / "script.py") if script == "ABSOLUTE" else script
    warm.job.script(script, PRINT_MAIN)
    ran, plain = warm.run(script, "--lr", "1")[0], warm.python(script, "--lr", "1")
    assert plain.code == 0, plain.output
    assert ran.output == plain.output


def test_a_symlinked_script_imports_from_where_it_really_is(warm: Warm) -> None:
    warm.job.script("real/neighbour.py", "x = 7")
    warm.job.script("real/script.py", "import neighbour; print(neighbour.x)")
    link = warm.job.work / "link.py"
    link.unlink(missing_ok=True)
    link.symlink_to("real/script.py")
    assert warm.run("link.py")[0].output == warm.python("link.py").output == "7\n"


def test_a_module_runs_as_with_python_m(warm: Warm) -> None:
    warm.job.script("package/__init__.py", "")
    warm.job.script("package/train.py", PRINT_MAIN + "\n    raise ValueError('x')\n")
    ran = warm.run("package.train", "--lr", "1", module=True)[0]
    plain = warm.python("-m", "package.train", "--lr", "1")
    address = re.compile("0x[0-9a-f]+")
    assert address.sub("", ran.output) == address.sub("", plain.output)
    assert ran.code == plain.code == 1


def test_a_module_that_does_not_exist_is_named_as_python_names_it(warm: Warm) -> None:
    ran, plain = warm.run("no.such", module=True)[0], warm.python("-m", "no.such")
    assert (ran.code, ran.output) == (plain.code, plain.output)


def test_a_directory_with_a_main_runs(warm: Warm) -> None:
    warm.job.script("program/__main__.py", "import sys; print(sys.argv, sys.path[0])")
    assert warm.run("program", "a")[0].output == warm.python("program", "a").output


ENDINGS = {
    "returns": "pass",
    "exits with 0": "import sys; sys.exit()",
    "exits with 3": "import sys; sys.exit(3)",
    "exits with 256": "import sys; sys.exit(256)",
    "exits with -1": "import sys; sys.exit(-1)",
    "exits with a sentence": "import sys; sys.exit('no data')",
    "exits with an object": "import sys; sys.exit([1])",
    "raises": "def f():\n    raise ValueError('bad')\nf()",
    "raises from": "try:\n    1 / 0\nexcept Exception as e:\n    raise OSError('x') from e",
    "cannot be compiled": "x = = 1",
    "cannot import": "import no_such_module",
    "is interrupted": "raise KeyboardInterrupt",
    "ends by a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "ends with _exit": "import os; os._exit(9)",
    "has its own hook": (
        "import sys, traceback\n"
        "sys.excepthook = lambda *a: (print('mine'), traceback.print_exception(*a))\n"
        "raise ValueError('x')"
    ),
    "has atexit and threads": (
        "import atexit, threading, time\n"
        "atexit.register(print, 'atexit')\n"
        "def late():\n    time.sleep(0.2); print('thread')\n"
        "threading.Thread(target=late).start()\n"
        "raise ValueError('x')"
    ),
    "raises in a thread": (
        "import threading\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join()"
    ),
    "raises a group": "raise ExceptionGroup('all', [ValueError('x')])",
    "raises recursively": "def f():\n    f()\ntry:\n    f()\nexcept RecursionError: print('deep')",
}


def test_programs_end_as_under_python(warm: Warm) -> None:
    """Exit code and every character of the output, tracebacks too. All at once, to save time."""
    started = {}
    for number, text in enumerate(ENDINGS.values()):
        name = warm.job.script(f"ending{number}.py", text).name
        request = warm.request(name)
        started[name] = (request, warm.fork(request), warm.start_python(name))
    ends = {
        name: (warm.end_of(request, reply, 0), warm.end_of_python(plain))
        for name, (request, reply, plain) in started.items()
    }
    for ending, (ran, plain) in zip(ENDINGS, ends.values(), strict=True):
        assert (ending, ran.code, ran.output) == (ending, plain.code, plain.output)


def test_an_uncaught_exception_is_left_in_torchs_error_file(warm: Warm) -> None:
    ran = warm.one("def f():\n    raise ValueError('bad')\nf()")
    assert ran.error is not None
    message = ran.error["message"]
    assert message["message"] == "ValueError: bad"
    assert message["extraInfo"]["py_callstack"] == ran.output
    assert message["extraInfo"]["timestamp"].isdecimal()
    assert warm.one("import sys; sys.exit(3)").error is None


def test_what_torchs_record_wrote_is_kept(warm: Warm) -> None:
    ran = warm.one(
        """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        main()
        """
    )
    assert ran.code == 1
    assert ran.error is not None
    assert "recorded" in str(ran.error["message"])
    assert "in wrapper" in str(ran.error), "torch's own decorator is in the stack it wrote"


# --- a clean process -----------------------------------------------------------------------------


def test_a_rank_is_a_session_of_its_own_with_clean_signals_and_files(warm: Warm) -> None:
    ran = warm.one(
        """
        import os, signal, sys
        print("leader", os.getsid(0) == os.getpid() == os.getpgid(0))
        print("files", sorted(os.listdir("/proc/self/fd"))[:-1])
        print("stdin", os.readlink("/proc/self/fd/0"))
        print("threads", len(os.listdir("/proc/self/task")))
        print("handlers", [int(n) for n in sorted(signal.valid_signals() - {9, 19})
                           if signal.getsignal(n) != signal.SIG_DFL])
        print("blocked", signal.pthread_sigmask(signal.SIG_BLOCK, []))
        print("umask", oct(os.umask(0o22)))
        print("cwd", os.getcwd())
        """
    )
    said = dict(line.split(" ", 1) for line in ran.output.splitlines())
    assert said["leader"] == "True"
    assert said["files"] == "['0', '1', '2']"
    assert said["stdin"] == "/dev/null"
    assert said["threads"] == "1"
    assert said["handlers"] == str([2, 13, 25]), "SIGINT, SIGPIPE, SIGXFSZ: as python has it"
    assert said["blocked"] == "set()"
    assert said["cwd"] == str(warm.job.work)


def test_the_slot_names_the_rank_before_its_first_line(warm: Warm) -> None:
    request = warm.request(
        warm.job.script("sleep.py", "import time; time.sleep(100)").name, ranks=3
    )
    reply = warm.fork(request)
    beats = SlotReader(warm.heartbeat, 3).read()
    for forked, beat in zip(sorted(reply.ranks, key=lambda each: each.rank), beats, strict=True):
        assert beat is not None
        assert (beat.generation, beat.rank) == (warm.generation, forked.rank)
        assert (beat.pid, beat.start_ticks) == (forked.pid, forked.start_ticks)
        assert identify(forked.pid) == (forked.pid, forked.start_ticks)
        assert not beat.attached
        os.killpg(forked.pid, signal.SIGKILL)
        assert warm.end_of(request, reply, forked.rank).code == -signal.SIGKILL


def test_ranks_draw_different_random_numbers_in_every_generation(warm: Warm) -> None:
    warm.job.script(
        "script.py",
        """
        import random, numpy, torch, multiprocessing
        print(random.random(), numpy.random.random(), torch.rand(1).item(), torch.initial_seed(),
              bytes(multiprocessing.current_process().authkey).hex())
        """,
    )
    drawn = [ran.output.split() for _ in range(2) for ran in warm.run("script.py", ranks=2)]
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 4, column


def test_threads_are_as_many_as_the_rank_was_told(warm: Warm) -> None:
    text = """
        import os, numpy, torch
        print(torch.get_num_threads(), os.environ.get("OPENBLAS_NUM_THREADS"))
        a = numpy.ones((512, 512)); a @ a
        print(len(os.listdir("/proc/self/task")))
    """
    assert warm.one(text, env={"OMP_NUM_THREADS": "1"}).output == "1 None\n1\n"
    assert warm.one(text, env={"OMP_NUM_THREADS": "3"}).output == "3 None\n3\n"


def test_output_is_in_the_log_at_once_and_appended(warm: Warm) -> None:
    warm.job.script("script.py", "import time; print('hello'); time.sleep(100)")
    request = warm.request("script.py")
    Path(request.ranks[0].log).write_text("before\n")
    reply = warm.fork(request)
    log = Path(request.ranks[0].log)
    wait_for("its output", lambda: log.read_text() == "before\nhello\n")
    os.kill(reply.ranks[0].pid, signal.SIGTERM)
    assert warm.end_of(request, reply, 0).code == -signal.SIGTERM


def test_user_modules_are_new_in_every_generation(warm: Warm) -> None:
    warm.job.script("script.py", "import helper; print(helper.x)")
    for value in (1, 2, 3):
        warm.job.script("helper.py", f"x = {value}  #{' ' * value}")
        assert warm.run("script.py")[0].output == f"{value}\n"


# --- data loaders, pickling, process groups ------------------------------------------------------

LOADER = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self): return 8
        def __getitem__(self, i): return torch.tensor(i)

    class Collate:
        def __call__(self, batch): return torch.stack(batch)

    if __name__ == "__main__":
        for method, workers in ("fork", 2), ("spawn", 1):
            loader = DataLoader(Numbers(), batch_size=4, num_workers=workers, collate_fn=Collate(),
                                multiprocessing_context=method)
            print(method, sum(batch.sum().item() for batch in loader))
"""


def test_data_loader_workers_start_by_fork_and_by_spawn(warm: Warm) -> None:
    """Spawn imports the script again and unpickles its classes: __main__ must be a true one."""
    assert warm.one(LOADER).output == "fork 28\nspawn 28\n"


def test_classes_of_main_survive_pickling(warm: Warm) -> None:
    ran = warm.one(
        """
        import pickle, torch, io
        class State:
            pass
        file = io.BytesIO()
        torch.save({"s": State()}, file)
        file.seek(0)
        print(type(torch.load(file, weights_only=False)["s"]) is State, State.__module__)
        print(type(pickle.loads(pickle.dumps(State()))) is State)
        """
    )
    assert ran.output == "True __main__\nTrue\n"


GROUPS = """
    import os, sys, torch, torch.distributed as dist
    for round in range(2):
        dist.init_process_group("gloo")
        x = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        assert x.item() == 3.0, x
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = sys.argv[1]
    print("ok")
"""


def test_a_script_may_destroy_and_create_its_process_group(
    warm: Warm, free_ports: list[int]
) -> None:
    warm.job.script("script.py", GROUPS)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports[0])}
    ends = warm.run("script.py", str(free_ports[1]), ranks=2, env=env)
    assert [ran.output for ran in ends] == ["ok\n", "ok\n"]


@pytest.fixture
def free_ports() -> list[int]:
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return ports


# --- other ways to start -------------------------------------------------------------------------


def test_no_fork_starts_a_fresh_interpreter_that_behaves_alike(warm: Warm) -> None:
    text = "import sys\nprint('torch' in sys.modules, sys.argv)\nraise ValueError('x')"
    warm.job.script("script.py", text)
    plain = warm.python("script.py", "a")
    ran = warm.run("script.py", "a", no_fork=True)[0]
    assert (ran.code, ran.output) == (plain.code, plain.output)
    assert ran.output.startswith("False ['script.py', 'a']\n")
    assert ran.error is not None
    assert ran.error["message"]["message"] == "ValueError: x"
    beat = SlotReader(warm.heartbeat, 1).read()[0]
    assert beat is not None
    assert beat.generation == warm.generation


def test_no_python_runs_any_program(warm: Warm) -> None:
    ran = warm.run("sh", "-c", "echo $RANK; exit 5", no_python=True)[0]
    assert (ran.code, ran.output) == (5, "0\n")


@pytest.mark.parametrize(
    ("command", "fields", "says"),
    [
        (["missing.py"], {}, "missing.py does not exist"),
        (["no-such-program"], {"no_python": True}, "no-such-program was not found"),
        (["script.py"], {"working_dir": "/no/such/dir"}, "working directory /no/such/dir does not"),
    ],
)
def test_what_cannot_begin_is_refused_in_one_sentence(
    warm: Warm, command: list[str], fields: dict[str, Any], says: str
) -> None:
    reply = warm.fork(warm.request(*command, **fields))
    assert says in reply.problem
    assert reply.problem.endswith(".")
    assert not reply.ranks


def test_a_log_that_cannot_be_opened_is_refused_in_one_sentence(warm: Warm) -> None:
    warm.job.script("script.py", "pass")
    request = warm.request("script.py")
    Path(request.ranks[0].log).mkdir()
    reply = warm.fork(request)
    assert "Rank 0 could not be set up" in reply.problem
    assert request.ranks[0].log in reply.problem


LEAK = """
import threading
from everstep.agent import warm
print(warm.why_not_to_fork())
threading.Thread(target=threading.Event().wait, name="leak", daemon=True).start()
print(warm.why_not_to_fork())
"""


def test_a_launcher_with_a_second_thread_refuses_to_fork() -> None:
    said = subprocess.check_output([sys.executable, "-c", LEAK], text=True).splitlines()
    assert said[0] == "None"
    assert "has 2 threads (leak)" in said[1]
    assert "--no-fork" in said[1]


def test_open_device_files_are_seen(tmp_path: Path) -> None:
    """There may be no GPU here, so another file stands for its device file."""
    with (tmp_path / "nvidia0").open("w"):
        assert warm_module.open_files_below(f"{tmp_path}/nvidia") == [f"{tmp_path}/nvidia0"]
    assert warm_module.open_files_below(f"{tmp_path}/nvidia") == []


# --- forked ahead of time ------------------------------------------------------------------------


SHARDED = """
    import sys
    before = set(sys.modules)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    import torch
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    torch.optim.AdamW([model.weight]).step()
    print(sorted(set(sys.modules) - before))
"""


def test_a_restart_of_sharded_training_imports_nothing_of_torch_again(warm: Warm) -> None:
    """FSDP2, tensor parallelism and the first optimizer would take each rank some two seconds."""
    ran = warm.one(SHARDED)
    assert ran.code == 0, ran.output
    assert ran.output == "[]\n"


def test_ranks_are_those_that_wait_already(warm: Warm) -> None:
    warm.job.script(
        "script.py", "import os; print(os.environ['RANK'], os.getsid(0) == os.getpid())"
    )
    parked = warm.job.parked()
    request = warm.request("script.py", ranks=2)
    reply = warm.fork(request)
    assert {forked.pid for forked in reply.ranks} == parked
    assert [warm.end_of(request, reply, rank).output for rank in (0, 1)] == ["0 True\n", "1 True\n"]


def test_a_lost_parked_rank_is_replaced_and_costs_nothing_but_time(warm: Warm) -> None:
    warm.job.script("script.py", "import os; print(os.environ['RANK'])")
    parked = warm.job.parked()
    pidfd = os.pidfd_open(max(parked))
    os.kill(max(parked), signal.SIGKILL)
    select.select([pidfd], [], [])  # its end is a fact, so the launcher can see it
    os.close(pidfd)
    assert [ran.output for ran in warm.run("script.py", ranks=2)] == ["0\n", "1\n"]
    assert not warm.job.parked() & parked


# --- kills ---------------------------------------------------------------------------------------


def test_a_killed_launcher_disturbs_no_rank_and_the_next_one_serves(warm: Warm) -> None:
    warm.job.script(
        "script.py",
        """
        import os, time
        while not os.path.exists("go"): time.sleep(0.01)
        print("done")
        """,
    )
    request = warm.request("script.py", ranks=2)
    reply = warm.fork(request)
    parked = warm.job.parked()
    launcher = warm.job.pid("launcher")
    os.kill(launcher, signal.SIGKILL)
    wait_for("the end of its parked ranks", lambda: not any(map(is_running, parked)))
    warm.job.pid("launcher", other_than=launcher)
    (warm.job.work / "go").touch()
    for rank in range(2):
        assert warm.end_of(request, reply, rank) == (0, "done\n", None)
    (warm.job.work / "go").unlink()
    assert warm.one("print(1)").output == "1\n"


def test_garbage_on_the_socket_harms_nobody(warm: Warm) -> None:
    warm.one("pass")
    for garbage in (
        b"",
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00abc",
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(warm.job.machine.launcher_socket))
            connection.sendall(garbage)
    assert warm.one("print(1)").output == "1\n"


def test_the_socket_is_its_owners_alone(warm: Warm) -> None:
    warm.one("pass")
    assert warm.job.machine.launcher_socket.stat().st_mode & 0o777 == 0o600
