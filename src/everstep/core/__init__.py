"""The decisions: pure, with no clock, no I/O, no threads and no randomness of their own."""
