"""A running job shows its layout: by its process groups, by the mesh that its script gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.commands.client import Client
from everstep.controller.views import StatusView
from everstep.core.layouts import GROUPS, MESH
from everstep.model import Fault, Rank
from tests.integration import gridded
from tests.integration.command import status_of
from tests.integration.support import wait_for
from tests.integration.test_survival import Trained, training

pytestmark = pytest.mark.torch
FLAGS = ("--local-machines", "4", "--nproc-per-node", "1", "--standbys", "0", "--disk-every", "0")


def told(job: Trained, source: str, *, differs: bool = False) -> StatusView:
    """The status once this is the source of the layout."""

    def look() -> StatusView | None:
        status = status_of(job.paths)
        if status is None or status.layout.source != source:
            return None
        return status if bool(status.layout.disagreement) == differs else None

    return wait_for(f"a layout from {source}", look)


def kill_a_rank(job: Trained) -> None:
    with Client(job.paths) as client:
        client.inject(Fault.KILL_RANK, Rank(3), None)


def test_the_layout_comes_from_process_groups_then_from_a_mesh_and_they_are_compared(
    tmp_path: Path,
) -> None:
    with training(tmp_path, "job", *FLAGS, script=Path(gridded.__file__)) as job:
        seen = told(job, GROUPS)
        assert seen.layout.text == "tp=2, dp=2"
        placement, *_ = seen.mechanisms
        assert placement.on
        assert placement.why.startswith("backups move along tp and dp by half their size")

        kill_a_rank(job)
        seen = told(job, MESH)
        assert (seen.layout.text, seen.layout.remarks) == ("tp=2, dp=2", ())

        kill_a_rank(job)
        seen = told(job, MESH, differs=True)
        assert seen.layout.text == "dp=2, tp=2"
        notes = [note for note in seen.notes if "the layout from" in note]
        assert notes == [seen.layout.disagreement]
        assert "the process groups of torch.distributed, tp=2, dp=2" in notes[0]
