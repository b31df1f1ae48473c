"""One look at all processes of this machine's ranks: stacks, kernel states, flight records.

effects.py hands the orders to `Tracer` (tracer.py), which asks the other modules: families.py says
which processes there are, kernel.py what the kernel says of each, spy.py and signalled.py what
their stacks are, recorder.py how far their collectives came. Whatever hangs is given up in time.
"""
