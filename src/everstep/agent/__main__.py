"""`python -P -m everstep.agent MACHINE_JSON`: the agent of one machine, started by its keeper."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from everstep.agent.shell import AgentShell
from everstep.agent.this_machine import ThisMachine
from everstep.model import EverstepError


async def _run(machine_json: Path) -> None:
    here = ThisMachine.read(machine_json)
    async with asyncio.TaskGroup() as tasks:
        await AgentShell(here, tasks).run()


def main() -> None:
    """Run until killed. An error of ours is one sentence; the keeper starts us again."""
    try:
        asyncio.run(_run(Path(sys.argv[1])))
    except* EverstepError as problems:
        sys.exit("\n".join(f"everstep agent: {problem}" for problem in problems.exceptions))


if __name__ == "__main__":
    main()
