"""What ranks print drives the controller: a machine that says it broke leaves, no step is lost."""

from __future__ import annotations

from pathlib import Path

from everstep.commands import offline
from tests.integration.support import job

BROKEN_GPU = """
import os, time
import everstep

class Box:
    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        print("restored", state["step"], flush=True)

run, box = everstep.attach(), Box()
ckpt = run.checkpoint({"box": box})
rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in run.steps(start=ckpt.restore(), stop=60):
    if first and step == 30:
        if rank == 0:
            open("there", "w").close()
        if rank == 1:
            while not os.path.exists("there"):  # nothing else keeps these ranks together
                time.sleep(0.01)
            print("RuntimeError: CUDA error: uncorrectable ECC error encountered", flush=True)
            os.abort()
        time.sleep(3600)
    box.step = step
    time.sleep(0.05)
    run.report(loss=2.5)
    ckpt.save(step)
"""

SAME_ERROR = """
import time
import everstep

run = everstep.attach()
ckpt = run.checkpoint({})
for step in run.steps(start=ckpt.restore(), stop=60):
    if step == 30:
        {}["gloss"]
    time.sleep(0.01)
    run.report(loss=2.5)
    ckpt.save(step)
"""


def test_a_machine_that_says_its_gpu_broke_is_evicted_and_no_step_is_lost(tmp_path: Path) -> None:
    with job(tmp_path, BROKEN_GPU, nnodes=2, standbys=1) as running:
        running.start()
        result = running.result()
        assert (result.outcome, result.exit_code) == ("finished", 0), running.logs()
        (incident,) = offline.incidents(running.paths).incidents
        assert incident.evicted == ("m1",)
        assert incident.cause.startswith("gpu memory error: a GPU reported an ECC error")
        assert incident.restored in {28, 29}, "step 29 may have been on its way when it aborted"
        story = offline.why(running.paths, "m1")
        assert any("uncorrectable ECC error encountered" in str(each.fields) for each in story)


def test_the_same_error_of_the_program_is_tried_once_more_and_no_third_time(
    tmp_path: Path,
) -> None:
    with job(tmp_path, SAME_ERROR, nnodes=1) as running:
        running.start()
        result = running.result()
        assert result.outcome == "failed"
        (incident,) = offline.incidents(running.paths).incidents
        assert incident.recoveries == 1
        assert "the same error twice after step 29" in incident.outcome
        assert "KeyError: 'gloss'" in incident.outcome
