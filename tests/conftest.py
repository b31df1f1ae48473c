"""For all tests: no generated example has a time to keep, since machines are shared and noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("everstep", deadline=None)
settings.load_profile("everstep")
