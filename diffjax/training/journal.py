"""What the host learns from each step, read one step late: window means, rejected steps, tokens seen."""

import json
import math
import time
from pathlib import Path

import jax

from diffjax.config import Config
from diffjax.training import guard
from diffjax.training.memory import memory_metrics
from diffjax.training.tracking import Progress, Trackers, is_first_process, plain

SCALARS = ("learning_rate", "grad_norm", "update_norm", "param_norm")


class Journal:
    """Fed by `send(step, metrics)`, which fetches the metrics of the step before while the devices work on this one.

    peak_rows    rows per second at the devices' peak, for `train/mfu`; None where the peak is not known
    tokens_seen  valid tokens of all steps, a Python int (int32 would overflow)
    stuck        None, or why the guard gives the run up
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        trackers: Trackers,
        progress: Progress,
        leaf_paths: list[str],
        tokens_seen: int = 0,
        peak_rows: float | None = None,
    ):
        self.tokens_seen = tokens_seen
        self.stuck: str | None = None
        self._config, self._run_dir, self._peak_rows = config, run_dir, peak_rows
        self._trackers, self._progress, self._leaf_paths = trackers, progress, leaf_paths
        self._pending: tuple | None = None
        self._clear()
        self._since: float | None = None

    def _clear(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._tokens = self._steps = self._rejected = 0
        self._waited = 0.0
        self._since = time.monotonic()

    def send(self, step: int, metrics: dict, waited: float) -> None:
        """The metrics of batch `step`, just dispatched; the loop had waited so many seconds for the batch."""
        if self._since is None:
            self._since = time.monotonic()
        previous, self._pending = self._pending, (step, metrics, waited)
        if previous is not None:
            self._read(*previous)

    def drain(self) -> None:
        """Read the step that is still out and stop the clock: what follows is no training time."""
        previous, self._pending = self._pending, None
        if previous is not None:
            self._read(*previous)
        self._clear()
        self._since = None

    def evaluation(self, step: int, record: dict) -> None:
        """Log a record of held-out numbers; texts and missing values in it stay out of the metrics."""
        numbers = {name: value for name, value in record.items() if type(value) in (int, float)}
        named = {name if "/" in name else f"eval/{name}": value for name, value in numbers.items()}
        self._log(step, named)
        if "eval/nelbo_nats_per_token" in named:
            self._progress.held_out(step, named["eval/nelbo_nats_per_token"])

    def _read(self, step: int, metrics: dict, waited: float) -> None:
        metrics = jax.device_get(metrics)
        self._waited += waited
        self.tokens_seen += int(metrics["tokens"])
        self._tokens += int(metrics["tokens"])
        self._steps += 1
        if metrics["reason"] != guard.ACCEPTED:
            self._reject(step, metrics)
        else:
            for name, (total, weight) in metrics["sums"].items():
                before = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (before[0] + float(total), before[1] + float(weight))
        training = self._config.training
        logged = step % training.log_every == 0 or step == training.steps - 1
        seconds = max(time.monotonic() - self._since, 1e-9)
        self._progress.step(step + 1, float(metrics["loss"]), self._tokens / seconds, logged=logged)
        if logged:
            values = {f"train/{name}": total / max(weight, 1.0) for name, (total, weight) in self._sums.items()}
            values |= {f"train/{name}": float(metrics[name]) for name in SCALARS}
            values |= {
                "train/rejected": self._rejected,
                "train/tokens_seen": self.tokens_seen,
                "train/tokens_per_second": self._tokens / seconds,
                "train/step_seconds": seconds / self._steps,
                "train/data_seconds": self._waited / self._steps,
            }
            if self._peak_rows is not None:  # every row costs the same, padding and rejected steps included
                rows = training.batch_size * self._steps
                values["train/mfu"] = rows / seconds / self._peak_rows
            values |= memory_metrics()
            self._log(step, values)
            self._clear()

    def _log(self, step: int, values: dict) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                self._progress.say(f"WARNING: step {step}: {name} is {value}")
        self._trackers.log(step, values)

    def _reject(self, step: int, metrics: dict) -> None:
        size, bad_leaf = self._config.training.batch_size, int(metrics["bad_leaf"])
        reason = guard.REASONS[int(metrics["reason"])]
        record = {
            "step": step,
            "reason": reason,
            "loss": float(metrics["loss"]),
            "grad_norm": float(metrics["grad_norm"]),
            "limit": float(metrics["limit"]),
            "leaf": self._leaf_paths[bad_leaf] if bad_leaf >= 0 else None,
            "rows": [step * size, (step + 1) * size - 1],
        }
        self._rejected += 1
        if is_first_process():
            with open(self._run_dir / "rejects.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({name: plain(value) for name, value in record.items()}) + "\n")
        where = f", first leaf not finite: {record['leaf']}" if record["leaf"] else ""
        text = (
            f"step {step} rejected: {reason} (loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}, "
            f"limit {record['limit']:.4g}{where}; rows {record['rows'][0]} to {record['rows'][1]} of the data order)"
        )
        self._progress.say(text)
        consecutive = int(metrics["consecutive"])
        if self.stuck is None and consecutive >= self._config.guard.max_consecutive:
            self.stuck = f"{consecutive} steps in a row were rejected; the last: {text}"
