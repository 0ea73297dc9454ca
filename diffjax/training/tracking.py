"""Where a run's numbers go: metrics.jsonl always, Weights & Biases when asked, one live line on a terminal."""

import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax

from diffjax.config import Config
from diffjax.config_loading import to_dict


class Tracker(Protocol):
    """Takes numbers. Never stops a run: whatever goes wrong inside is said once and then left."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One object a line: {"step", "name", "value", "time"}, time in seconds since 1970, flushed at once.

    Values that are not finite are written as the texts NaN, Infinity and -Infinity, which every JSON reader takes and
    which `float()` turns back.
    """

    def __init__(self, path: Path):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def log(self, step, values):
        now = round(time.time(), 3)
        for name, value in values.items():
            self._file.write(json.dumps({"step": step, "name": name, "value": plain(value), "time": now}) + "\n")
        self._file.flush()

    def close(self):
        self._file.close()


class WandbTracker:
    """Weights & Biases; `tracking.mode` offline needs no network. A resumed run keeps its id and goes on."""

    def __init__(self, config: Config, run_id: str):
        import wandb

        tracking = config.tracking
        self._run = wandb.init(
            project=tracking.project,
            id=run_id,
            resume="allow",
            dir=config.run.dir,
            mode=tracking.mode,
            config=to_dict(config),
        )

    def log(self, step, values):
        self._run.log(values, step=step)

    def close(self):
        self._run.finish()


class Safely:
    """Wraps a tracker: the first failure becomes one warning, after it the tracker is left alone."""

    def __init__(self, name: str, make: Callable[[], Tracker]):
        self._name = name
        self._tracker = None
        self._tracker = self._try(make)

    def _try(self, action: Callable):
        try:
            return action()
        except Exception as error:
            self._tracker = None
            warnings.warn(f"{self._name} failed and is left out from here on: {error}", RuntimeWarning, stacklevel=3)

    def log(self, step, values):
        if self._tracker is not None:
            self._try(lambda: self._tracker.log(step, values))

    def close(self):
        if self._tracker is not None:
            self._try(self._tracker.close)
        self._tracker = None


class Trackers:
    """All trackers of a run, on the first process; on others the same calls do nothing and make no files."""

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        self._trackers: list[Safely] = []
        if not is_first_process():
            return
        self._trackers.append(Safely("metrics.jsonl", lambda: JsonlTracker(run_dir / "metrics.jsonl")))
        if config.tracking.wandb:
            self._trackers.append(Safely("wandb", lambda: WandbTracker(config, run_id)))

    def log(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


class Progress:
    """Shows the run: one live line on a terminal, a line of text every `log_every` steps elsewhere."""

    def __init__(self, steps: int, start: int = 0, stream=None):
        self._steps, self._start = steps, start
        self._stream = sys.stdout if stream is None else stream
        self._held_out = None
        self._began = time.monotonic()
        self._live = None
        if not is_first_process():
            self._show = lambda *_: None
        elif self._stream.isatty():
            self._show = self._show_live
            self._open_live()
        else:
            self._show = self._show_line

    def _open_live(self):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._live = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._live.add_task("compiled", total=self._steps, completed=self._start)
        self._live.start()

    def step(self, done: int, loss: float, tokens_per_second: float, *, logged: bool) -> None:
        """`done` steps of the run are done, the last with this loss."""
        self._show(done, self._text(done, loss, tokens_per_second), logged)

    def held_out(self, done: int, nelbo: float) -> None:
        """The held-out NELBO, nats per token, of the model after `done` steps."""
        self._held_out = nelbo
        self.say(f"step {done}/{self._steps}  held-out NELBO <= {nelbo:.4f} nats/token")

    def say(self, text: str) -> None:
        """A line of its own, above the live line."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif is_first_process():
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _text(self, done, loss, tokens_per_second):
        held_out = "" if self._held_out is None else f"  held-out NELBO <= {self._held_out:.3f}"
        left = (self._steps - done) * (time.monotonic() - self._began) / max(done - self._start, 1)
        return f"loss {loss:.3f}{held_out}  {tokens_per_second:,.0f} tokens/s  ETA {duration(left)}"

    def _show_live(self, done, text, logged):
        if self._live is not None:
            self._live.update(self._task, completed=done, description=text)

    def _show_line(self, done, text, logged):
        if logged:
            print(f"step {done}/{self._steps}  {text}", file=self._stream, flush=True)


def is_first_process() -> bool:
    return jax.process_index() == 0


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def plain(value):
    """A value as strict JSON can hold it."""
    if isinstance(value, str | bool | int | list | None):
        return value
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def cut_records(path: Path, step: int) -> None:
    """Move the lines of a JSONL file whose step is `step` or later to NAME.old.jsonl: that part is run again.

    A last line that a killed process left half-written goes the same way.
    """
    if not path.exists() or not is_first_process():
        return
    kept, cut = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
            keep = record["step"] < step and line.endswith("\n") and ("name" in record or "reason" in record)
        except (ValueError, KeyError, TypeError):
            keep = False
        (kept if keep else cut).append(line)
    if not cut:
        return
    with open(path.with_suffix(".old.jsonl"), "a", encoding="utf-8") as old:
        old.writelines(line if line.endswith("\n") else line + "\n" for line in cut)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def read_metric(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of every record called `name` in the run's metrics.jsonl, in order."""
    path = run_dir / "metrics.jsonl"
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return [(record["step"], float(record["value"])) for record in records if record["name"] == name]
