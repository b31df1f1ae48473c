"""Checks of a machine while it trains: one file per signal, sampling apart from judging.

check.py is the interface, registry.py the list. A source takes samples (files of /proc and /sys,
NVML, the kernel log); checks judge them, as pure functions of samples and history. runner.py asks
the sources when it is time, in a child process if they may block; monitor.py turns results into
alerts. The agent's shell and `everstep check` use them.
"""
