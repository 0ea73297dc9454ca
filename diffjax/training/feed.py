"""Batches ahead of time: a thread reads and places the next two steps while the devices work."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from diffjax.data.batch import Batch

AHEAD = 2


class Feed:
    """`feed(step)` for consecutive steps. An error in reading is raised at the step whose batch it concerns."""

    def __init__(self, read: Callable[[int], Batch], first: int, stop: int):
        self._read, self._next, self._stop = read, first, stop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="diffjax-feed")
        self._waiting: list[tuple[int, Future]] = []

    def __call__(self, step: int) -> Batch:
        while len(self._waiting) <= AHEAD and self._next < self._stop:
            self._waiting.append((self._next, self._pool.submit(self._read, self._next)))
            self._next += 1
        number, future = self._waiting.pop(0)
        if number != step:
            raise ValueError(f"the feed is at step {number}, not {step}")
        return future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
