"""Real processes for tests: each with devices of its own, a log file, a deadline, and SIGKILL at the end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUTS = [f"distributed.{name}_timeout_s=10" for name in ("init", "heartbeat", "shutdown")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(count: int, port: int | None = None) -> list[list[str]]:
    """The overrides by which `count` processes find each other."""
    place = [f"distributed.coordinator=127.0.0.1:{port or free_port()}", f"distributed.num_processes={count}"]
    return [[*place, f"distributed.process_id={rank}", *TIMEOUTS] for rank in range(count)]


class Process:
    """`python -m MODULE ARGUMENTS` with `devices` CPU devices, standard output and error in one log."""

    def __init__(self, log: Path, module: str, arguments, devices: int, cache: Path):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "GLIBC_TUNABLES": "",  # no second start
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        environment = {key: value for key, value in environment.items() if not key.startswith("SLURM_")}
        self.log = log
        with open(log, "w", encoding="utf-8") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        return self.output.rstrip().splitlines()[-1]

    def wait_for(self, text: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end and self.popen.poll() is None, f"no '{text}' in:\n{self.output}"
            time.sleep(0.05)

    def wait(self, seconds: float) -> int:
        code = self.popen.wait(seconds)
        time.sleep(0.2)  # a last line may still be on its way
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@contextlib.contextmanager
def running(*processes: Process):
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def train(folder: Path, name: str, processes: int, *overrides, hooks: dict | None = None, own=(), seconds=150):
    """`diffjax train` of folder/tiny.yaml over 4 devices of 1 or 2 processes: [(exit code, output)] by rank.

    hooks: see `tests.parallel.hooked`; own: for each rank, overrides that it alone gets.
    """
    places = ranks(processes) if processes > 1 else [[]]
    started = []
    for rank, place in enumerate(places):
        arguments = [json.dumps({"rank": rank, **(hooks or {})}), "train", folder / "tiny.yaml", *place, *overrides]
        arguments += own[rank] if own else []
        log = folder / f"{name}.{rank}.log"
        started.append(Process(log, "tests.parallel.hooked", arguments, 4 // processes, folder / "compile_cache"))
    with running(*started):
        end = time.monotonic() + seconds
        results = []
        for process in started:
            try:
                results.append(process.wait(max(1.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                logs = "\n\n".join(process.output for process in started)
                raise AssertionError(f"{name} did not end in {seconds} s:\n{logs}") from None
        return [(code, process.output) for code, process in zip(results, started, strict=True)]
