"""Ends a process that hangs: a collective whose peer is gone, a disk that never answers."""

import faulthandler
import os
import threading
import time

STDERR = 2
GRACE_S = 5  # for Python's own report, before the one that needs no interpreter


class Watchdog:
    """Leaves with exit code 1 and the stacks of all threads on standard error when nothing ended for `seconds`.

    Armed from `start()` to `close()`; `beat()` says that a step, a batch of an evaluation or a save has ended.
    Compiling an evaluation is part of its first batch. Should the hang hold the interpreter itself, so that none of its
    threads can run, a timer of `faulthandler`, which needs none, does the same a little later.
    """

    def __init__(self, seconds: int):
        self._seconds = seconds
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        self._last = time.monotonic()

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            left = self._last + self._seconds - time.monotonic()
            if left <= 0:
                self._leave()
            faulthandler.dump_traceback_later(left + GRACE_S, exit=True, file=STDERR)
            if self._closed.wait(min(left, self._seconds / 4)):
                return

    def _leave(self) -> None:
        # Not print: the hung thread may hold the stream's lock.
        text = f"\nno step, evaluation batch or save ended for {self._seconds} s (training.watchdog_s); all stacks:\n"
        os.write(STDERR, text.encode())
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(1)
