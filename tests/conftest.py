"""For all tests: no generated example has a time to keep, since machines are shared and noisy.

And what is started here can be hung up, also where the tests themselves run under nohup. What
pytest knows of thousands of tests is no garbage, and is not looked at for it: that saves each
worker two seconds.
"""

from __future__ import annotations

import gc
import signal

import pytest
from hypothesis import settings

settings.register_profile("everstep", deadline=None)
settings.load_profile("everstep")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All tests are known, or others know them."""
    gc.enable()
    gc.freeze()
