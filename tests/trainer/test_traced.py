"""That ranks let others of their user look into them, where Yama's ptrace_scope is 1.

Few kernels of test machines have Yama. A library in front of libc's prctl stands in for it, and
writes down what it was asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

PR_SET_PTRACER = 0x59616D61
ANY = 2**64 - 1
YAMA = """
    #include <stdio.h>
    #include <stdlib.h>
    #include <unistd.h>

    int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
        FILE *log = fopen(getenv("ASKED"), "a");
        fprintf(log, "%d %d %lu\\n", getpid(), option, a);
        fclose(log);
        return 0;
    }
"""
FORKS = """
    import os

    for place in range(2):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        print(child)
"""


@pytest.fixture
def yama(tmp_path: Path) -> dict[str, str]:
    """The environment of processes on a kernel that has it."""
    source, library = tmp_path / "yama.c", tmp_path / "yama.so"
    source.write_text(dedent(YAMA))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "ASKED": str(tmp_path / "asked")}


def test_a_rank_allows_it_and_so_does_each_child_that_it_forks(
    tmp_path: Path, yama: dict[str, str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(FORKS))
    argv = [sys.executable, "-m", "everstep.agent.rank_main", str(script)]
    rank = subprocess.Popen(argv, env=yama, stdout=subprocess.PIPE, text=True)
    children = [int(line) for line in rank.communicate()[0].split()]
    asked = [tuple(map(int, line.split())) for line in _lines(tmp_path / "asked")]
    assert rank.returncode == 0
    assert asked == [(pid, PR_SET_PTRACER, ANY) for pid in (rank.pid, *children)]


def test_a_child_does_it_once_however_often_its_parent_did(
    tmp_path: Path, yama: dict[str, str]
) -> None:
    program = "from everstep.trainer import traced\n" + "traced.let_be_traced()\n" * 2
    argv = [sys.executable, "-c", program + dedent(FORKS)]
    subprocess.run(argv, env=yama, stdout=subprocess.PIPE, check=True)
    assert len(_lines(tmp_path / "asked")) == 4


def test_a_kernel_without_yama_is_asked_and_nothing_comes_of_it() -> None:
    program = "from everstep.trainer import traced; print(traced.let_be_traced())"
    argv = [sys.executable, "-c", program]
    said = subprocess.run(argv, check=True, capture_output=True, text=True)
    there = Path("/proc/sys/kernel/yama").exists()
    assert (said.stdout.strip(), said.stderr) == (str(there), "")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
