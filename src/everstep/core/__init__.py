"""The decisions: pure, with no clock, no I/O, no threads and no randomness that was not passed in."""
