"""What the rules of diagnosis find in the output of ranks, as it comes.

Used by the shell: what output.py reads for people is read here too. Of what one rank prints again
and again the first line is told; the rest is the command's business, afterwards.
"""

from __future__ import annotations

from threading import Lock

import msgspec

from everstep.core.agent_io import FindingsRead
from everstep.diagnosis.findings import Site, Speaker
from everstep.diagnosis.logs import LogReader, Patterns, People
from everstep.diagnosis.scanner import Attentive
from everstep.diagnosis.silence import Ledger
from everstep.diagnosis.tables import own_rules
from everstep.diagnosis.who import Who
from everstep.events import OutputLines
from everstep.model import NO_GENERATION, Generation, MachineId, Rank, Step


class LogFindings:
    """The logs of one generation's ranks on this machine."""

    def __init__(self, machine: MachineId, world_size: int) -> None:
        self.world_size = world_size
        """Of the job as it is now."""
        self._machine = machine
        self._patterns: Patterns | None = None
        self._making = Lock()
        self._generation: Generation = NO_GENERATION
        self._readers: dict[Rank, LogReader] = {}

    def prepare(self) -> Patterns:
        """Make the patterns, if nobody has. Any thread may call it.

        A quiet script's first line is a traceback, and then its rank is about to be stopped: that
        shall not wait for a thousand patterns.
        """
        with self._making:
            if self._patterns is None:
                self._patterns = Patterns(own_rules(), Attentive)
            return self._patterns

    def read(self, lines: OutputLines, step: Step | None = None) -> FindingsRead | None:
        """Take new output of a rank; what it shows for the first time, or None.

        `step`: the newest that the ranks here have finished, if they tell.
        """
        if lines.generation != self._generation:
            self._generation = lines.generation
            self._readers = {}
        reader = self._readers.get(lines.rank)
        if reader is None:
            reader = self._readers[lines.rank] = self._reader(lines.rank)
        reader.feed(lines.text.encode())
        found = tuple(
            msgspec.structs.replace(
                finding,
                # Whatever a line's labels say: this rank wrote it, and here.
                speaker=Speaker(rank=lines.rank, machine=self._machine, pid=finding.speaker.pid),
                attempt=lines.generation,
                step=step,
            )
            for finding in reader.new_findings()
        )
        return FindingsRead(generation=lines.generation, findings=found) if found else None

    def _reader(self, rank: Rank) -> LogReader:
        people = People(Who(Site(world_size=self.world_size)), Ledger())
        return LogReader(f"rank-{rank}.log", self.prepare(), people, self._generation)
