"""A script of which only its processes are known: a look is taken when they do nothing."""

from __future__ import annotations

import signal
from pathlib import Path

from everstep.core.state import Phase
from everstep.model import PolicySpec
from everstep.processes import alive, send_signal
from tests.integration.hung import machine_of, process_of
from tests.integration.support import job, wait_for

SOON = PolicySpec(quiet_s=3.0, look_again_s=1.0)
UNATTACHED = """
import os, pathlib, time

mine, other = (pathlib.Path(f"at-{(int(os.environ['RANK']) + n) % 2}") for n in range(2))
here, finish = os.environ["TORCHELASTIC_RESTART_COUNT"], pathlib.Path("finish")
for step in range(1_000_000):
    mine.with_suffix(".new").write_text(f"{here} {step}")
    mine.with_suffix(".new").rename(mine)
    while not finish.exists() and (not other.exists() or other.read_text().split()[0] != here
        or int(other.read_text().split()[1]) < step):
        time.sleep(0.02)
    print("step", step, flush=True)
    time.sleep(0.05)
    if finish.exists():
        break
"""
"""Two ranks that wait for each other; everstep knows nothing of their steps."""


def test_a_script_that_tells_nothing_is_looked_at_when_it_has_been_quiet(tmp_path: Path) -> None:
    with job(tmp_path, UNATTACHED, standbys=1, policy=SOON) as running:
        running.start()
        victim = machine_of(running, 1)
        at = tmp_path / "at-1"
        wait_for("a few steps", lambda: at.exists() and int(at.read_text().split()[1]) > 20)
        stopped = process_of(running, 1)
        assert send_signal(stopped, signal.SIGSTOP)
        running.wait(lambda s: s.generation == 2 and s.phase is Phase.RUNNING, "a restart")
        (incident,) = running.incidents().incidents
        assert incident.evicted == (victim,)
        assert not alive(stopped)
        (tmp_path / "finish").touch()
        assert running.result().outcome == "finished"
