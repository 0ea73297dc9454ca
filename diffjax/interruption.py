"""SIGTERM outside the training loop, which has its own answer to it (`training/stop.py`)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from diffjax.errors import Preempted


@contextmanager
def preempted_by_sigterm(text: str) -> Iterator[None]:
    """SIGTERM inside raises Preempted where the program stands, so that every clean-up on the way out is done.

    Only in the main thread, the one that Python's signal handlers run in; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_):
        raise Preempted(f"SIGTERM: {text}")

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
