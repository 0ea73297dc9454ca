"""Being asked to stop: a flag that the loop polls, set by SIGTERM or the first Ctrl-C; a second Ctrl-C leaves at once.

With several processes JAX's preemption service owns SIGTERM: whichever process gets the signal, all are told to stop at
the same poll.
"""

import os
import signal
import sys
import threading

import jax
from jax.experimental import multihost_utils

from diffjax.parallel import distributed

EXIT_INTERRUPTED = 130


class StopRequest:
    """Context manager that owns the handlers while a run is in its loop; `poll()` tells whether to stop.

    Every process must poll equally often: what is compared between them is the number of polls.
    Outside the main thread no handler can be set and `poll()` is False unless `ask()` was called.
    """

    def __init__(self):
        self.reason: str | None = None
        self._several = distributed.process_count() > 1
        self._polls = 0
        self._signalled = False
        self._previous: dict = {}

    def __enter__(self):
        # A SIGTERM handler set after the service's own would silence the service.
        numbers = (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def poll(self) -> bool:
        if self._several and self.reason is None and jax.config.jax_enable_preemption_service:
            # A count of its own, not the step: a signal is then honoured between the batches of an evaluation too. The
            # service answers True for one number only, so the answer is kept.
            self._polls += 1
            if multihost_utils.reached_preemption_sync_point(self._polls):
                self.ask("SIGTERM")
        return self.reason is not None

    def _on_signal(self, number, _):
        asked = self._signalled or self.reason is not None
        if number == signal.SIGINT and asked:
            os._exit(EXIT_INTERRUPTED)
        self._signalled = True
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if not asked:
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            # Not print: a handler may interrupt another write to the same buffered stream.
            os.write(sys.stderr.fileno(), f"\n{name}: saving after this step{again}\n".encode())
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.ask(name)
