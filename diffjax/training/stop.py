"""Being asked to stop: SIGTERM and the first Ctrl-C set a flag that the loop polls, a second Ctrl-C leaves at once."""

import os
import signal
import sys
import threading

EXIT_INTERRUPTED = 130


class StopRequest:
    """Context manager that owns the handlers while a run is in its loop; `poll()` tells whether to stop.

    Outside the main thread no handler can be set and `poll()` is False unless `ask()` was called.
    """

    def __init__(self):
        self.reason: str | None = None
        self._previous: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def poll(self) -> bool:
        return self.reason is not None

    def _on_signal(self, number, _):
        if number == signal.SIGINT and self.reason is not None:
            os._exit(EXIT_INTERRUPTED)
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if self.reason is None:
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            # Not print: a handler may interrupt another write to the same buffered stream.
            os.write(sys.stderr.fileno(), f"\n{name}: saving after this step{again}\n".encode())
        self.ask(name)
