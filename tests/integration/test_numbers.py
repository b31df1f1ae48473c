"""Training's numbers in a whole job: a loss that is not finite costs a restart from before it."""

from __future__ import annotations

from pathlib import Path

from everstep.commands import offline
from tests.integration.support import job

BAD_ONCE = """
import time
import everstep

class Box:
    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        print("restored", state["step"], flush=True)

run, box = everstep.attach(), Box()
ckpt = run.checkpoint({"box": box})
start = ckpt.restore()
for step in run.steps(start=start, stop=40):
    if start == 0 and step == 21:
        time.sleep(3600)
    box.step = step
    time.sleep(0.01)
    run.report(loss=float("nan") if start == 0 and step == 20 else 2.5)
    ckpt.save(step)
"""

LOGGED = """
import pathlib, time

step = 0
while not pathlib.Path("finish").exists():
    loss = "nan" if step > 30 else "2.50"
    print(f" iteration {step:8d}/ 1000 | lm loss: {loss} | grad norm: 1.0 |", flush=True)
    step += 1
    time.sleep(0.02)
"""


def test_a_loss_that_is_not_finite_costs_a_restart_from_the_step_before_it(tmp_path: Path) -> None:
    with job(tmp_path, BAD_ONCE, nnodes=1) as running:
        running.start()
        result = running.result()
        assert (result.outcome, result.exit_code) == ("finished", 0), running.logs()
        (incident,) = offline.incidents(running.paths).incidents
        assert incident.symptom.endswith("the loss of rank 0 was not finite at step 20")
        assert incident.restored == 19


def test_what_an_unchanged_script_prints_is_told_to_people_and_stops_nothing(
    tmp_path: Path,
) -> None:
    with job(tmp_path, LOGGED, nnodes=1) as running:
        running.start()
        told = running.wait(lambda status: status.notes, "a page")
        assert told.generation == 1
        assert any("loss is nan at step 31" in note for note in told.notes), told.notes
        (tmp_path / "finish").touch()
        assert running.result().outcome == "finished"
        assert offline.incidents(running.paths).incidents == ()
