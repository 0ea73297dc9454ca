"""A trace of a few training steps, for TensorBoard or XProf."""

from collections.abc import Callable
from pathlib import Path

import jax

from diffjax.training.tracking import is_first_process


class Profile:
    """Traces the steps first .. last of `training.profile_steps` into RUN/profile, on the first process.

    The devices are waited for at the two ends of the trace and nowhere else. A run that starts after `first` and up to
    `last` traces what is left; one that starts later, none.
    """

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, say: Callable[[str], None]):
        self._steps = steps if is_first_process() else None
        self._folder, self._say = run_dir / "profile", say
        self._first: int | None = None  # of the trace under way

    def before(self, step: int, state) -> None:
        """`step` is about to be dispatched, from `state`."""
        if self._steps is not None and self._first is None and self._steps[0] <= step <= self._steps[1]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._first = step

    def after(self, step: int, state) -> None:
        """`step` was dispatched and makes `state`."""
        if self._first is not None and step == self._steps[1]:
            jax.block_until_ready(state)
            self._stop(step)

    def _stop(self, step: int) -> None:
        first, self._first = self._first, None
        jax.profiler.stop_trace()
        size = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        self._say(f"steps {first} to {step} are traced in {self._folder} ({size / 2**20:.1f} MiB)")

    def close(self, step: int) -> None:
        """End a trace that the run's end cut short; `step` was the last to be dispatched."""
        if self._first is not None:
            self._stop(step)
