"""Real processes on this machine: the whole of everstep at once."""
