"""Reads what the ranks of this machine wrote about their parallel groups (trainer/groups.py).

For shell.py, once per generation, when the heartbeat slots show that every rank finished a step: by
then each has written its file, if its script uses the library at all.
"""

from __future__ import annotations

from pathlib import Path

from everstep.core.seen import united
from everstep.files import FileUnreadable, read_json
from everstep.model import Generation, SeenGroups
from everstep.trainer.groups import RankGroups, file_of


def read_groups(shm: Path, local_ranks: int, generation: Generation) -> SeenGroups | None:
    """What they told together; None if one of them told nothing."""
    told = []
    for local_rank in range(local_ranks):
        try:
            found = read_json(file_of(shm, local_rank), RankGroups)
        except FileUnreadable:
            return None
        if found.generation != generation:
            return None
        told.append(found.seen)
    return united(told)
