"""Several processes as one run: joining, agreeing, waiting for each other, leaving. The only caller of jax.distributed.

With one process every function here works without a coordinator. What processes tell each other goes through the
coordinator's key-value store, not through the devices, so that waiting for hours needs no collective.
"""

import contextlib
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from diffjax.config import DistributedConfig
from diffjax.errors import UserError
from diffjax.parallel.launch import Join, choose, look_at_hardware, proxies

WAIT_SLICE_MS = 2000  # of a wait without an end, so that Ctrl-C is heard in between
LEAVE_ALONE_S = 5  # how long a process that failed waits for the others to end the same way


@dataclass
class _Group:
    """The processes this one has joined."""

    rank: int
    count: int
    client: object
    shutdown_timeout_s: int
    joined: str
    last_words: "LastWords"
    calls: itertools.count = field(default_factory=itertools.count)


_group: _Group | None = None


def start(config: DistributedConfig) -> None:
    """Join the other processes of this run. Comes before any question about devices; a second call does nothing.

    One line is printed before, because a join that times out is a native abort (exit code 134), no exception. On ranks
    above 0 standard output is silent from here on and each line on standard error says its rank.
    Raises UserError when the coordinator cannot be reached, or its port is taken.
    """
    global _group
    if _group is not None:
        return
    join = choose(config, os.environ, look_at_hardware())
    if join.mode == "none":
        print(f"one process: {join.reason}")
        return
    if join.process_id:
        _speak_as(join.process_id, join.num_processes)
    for name in proxies(os.environ):
        _say(f"WARNING: {name} is set; a proxy can hang the join: unset it, or name the coordinator in no_proxy")
    place = "the TPU pod"
    if join.coordinator:
        place = f"{join.coordinator} as process {join.process_id} of {join.num_processes}"
    _say(f"joining {place} (mode {join.mode}, timeout {config.init_timeout_s} s)", join.process_id)
    if join.coordinator and join.process_id:
        _reach(join.coordinator, config.init_timeout_s)
    elif join.coordinator:
        _check_port(join.coordinator)
    words = LastWords(f"ended while joining {place}: not every process came, see the end of each one's log")
    jax.distributed.initialize(
        **_arguments(join),
        initialization_timeout=config.init_timeout_s,
        heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        shutdown_timeout_seconds=config.shutdown_timeout_s,
    )
    from jax._src.distributed import global_state as state  # JAX has no public door to its key-value store

    _group = _Group(state.process_id, state.num_processes, state.client, config.shutdown_timeout_s, "", words)
    if join.coordinator is None and _group.rank:
        _speak_as(_group.rank, _group.count)
    hosts = gather(os.uname().nodename)
    _group.joined = "joined: " + ", ".join(f"{rank} ({host})" for rank, host in enumerate(hosts))
    print(_group.joined, flush=True)
    _last_words("ended without a report of its own, see the end of the other processes' logs")


def _last_words(text: str) -> None:
    _group.last_words.change(f"[rank {_group.rank}/{_group.count}] {text}; {_group.joined}")


def _arguments(join: Join) -> dict:
    if join.mode == "tpu":
        return {}
    return {
        "coordinator_address": join.coordinator,
        "num_processes": join.num_processes,
        "process_id": join.process_id,
        "local_device_ids": join.local_device_ids,
        "cluster_detection_method": "deactivate",  # JAX's own detection would assume one GPU for each process
    }


def _reach(coordinator: str, timeout_s: float) -> None:
    """Wait until the coordinator takes connections."""
    host, port = _split(coordinator)
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, timeout_s)).close()
            return
        except OSError as error:  # a name may also become known only now
            if time.monotonic() >= end:
                raise UserError(f"coordinator {coordinator} not reachable within {timeout_s} s ({error})") from None
        time.sleep(0.2)


def _check_port(coordinator: str) -> None:
    """Two services on one port would both start, and each wait for its own."""
    _, port = _split(coordinator)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(f"coordinator {coordinator}: port {port} of this host: {error.strerror}") from None


def _split(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"coordinator {coordinator}: expected host:port, such as 10.0.0.1:12321")
    return host.strip("[]"), int(port)


# Talking


def rank() -> int:
    return 0 if _group is None else _group.rank


def process_count() -> int:
    return 1 if _group is None else _group.count


def gather(text: str) -> list[str]:
    """What each process hands in, by rank, given to all. Every process must call; returns when the last one has."""
    if _group is None:
        return [text]
    client, name = _group.client, f"diffjax/{next(_group.calls)}"
    client.key_value_set(f"{name}/{_group.rank}", text)
    if _group.rank == 0:
        client.key_value_set(f"{name}/all", json.dumps([_wait(f"{name}/{rank}") for rank in range(_group.count)]))
    return json.loads(_wait(f"{name}/all"))


def from_first(make: Callable):
    """What `make` returns on process 0 (a JSON value), given to all; what it raises there, raised by all.

    Only process 0 calls `make`. A UserError stays one; anything else is a RuntimeError on the others.
    """
    if _group is None:
        return make()
    name = f"diffjax/{next(_group.calls)}"
    if _group.rank == 0:
        answer = {"error": "process 0 was interrupted", "user": False}
        try:
            value = make()
            answer = {"value": value}
        except Exception as error:
            answer = {"error": str(error) or repr(error), "user": isinstance(error, UserError)}
            raise
        finally:
            _group.client.key_value_set(name, json.dumps(answer))
        return value
    answer = json.loads(_wait(name))
    if "error" in answer:
        raise UserError(answer["error"]) if answer["user"] else RuntimeError(f"process 0 failed: {answer['error']}")
    return answer["value"]


def together(action: Callable, kind: type[Exception] = UserError):
    """action() of this process; where it raises `kind` on one, all raise it, with the rank of the first."""
    value, problem = None, None
    try:
        value = action()
    except kind as error:
        problem = error
    if _group is None:
        if problem is not None:
            raise problem
        return value
    for number, text in enumerate(gather("" if problem is None else str(problem) or repr(problem))):
        if text:
            raise kind(f"rank {number}: {text}") from problem
    return value


def agree(facts: dict) -> None:
    """Raise UserError on all processes, naming rank and key, unless all hold the same facts (name -> JSON value)."""
    if _group is None:
        return
    facts = {key: json.dumps(value) for key, value in facts.items()}
    first = from_first(lambda: facts)

    def compare():
        different = sorted(key for key in {*first, *facts} if first.get(key) != facts.get(key))
        if different:
            listed = "; ".join(f"{key}={facts.get(key)}, but {first.get(key)} on rank 0" for key in different[:5])
            raise UserError(f"{listed}. All processes of a run must start with the same")

    together(compare)


def _wait(key: str) -> str:
    """The value of a key, as soon as a process sets it. A process that dies meanwhile ends this one too."""
    while True:
        try:
            return _group.client.blocking_key_value_get(key, WAIT_SLICE_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# Leaving


def leave(code: int, *, together: bool) -> int:
    """The end of a process: returns `code` after a clean goodbye, or ends the process with it at once.

    together says that all processes end like this and are worth a long wait (clean ends, preemption). Otherwise a short
    wait shows whether the others fail as well. A process that is alone must not return: at its exit it would wait for
    the others and then be aborted with another code than its own.
    """
    global _group
    if _group is None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        seconds = _group.shutdown_timeout_s if together else LEAVE_ALONE_S
        _group.client.wait_at_barrier("diffjax/leave", 1000 * seconds)
    except jax.errors.JaxRuntimeError:
        _last_words(f"left with exit code {code} before the others")
        os._exit(code)
    _group.last_words.cancel()
    jax.distributed.shutdown()
    _group = None
    return code


class LastWords:
    """A line that is the last of this process's log when it dies without a word: killed, or aborted in native code.

    A shell that waits for this process to end says it. Where a container ends with its first process, it is not heard.
    """

    SHELL = """
trap '' TERM INT HUP
while IFS= read -r line; do last=$line; done
[ "$last" = "" ] || printf '%s\\n' "$last" >&2
"""

    def __init__(self, text: str):
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self.SHELL], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.change(text)

    def change(self, text: str) -> None:
        with contextlib.suppress(OSError):  # somebody killed the shell
            self._shell.stdin.write(text + "\n")
            self._shell.stdin.flush()

    def cancel(self) -> None:
        self.change("")
        with contextlib.suppress(OSError):
            self._shell.stdin.close()
        self._shell.wait()


class RankedLines(io.TextIOBase):
    """A text stream whose lines all begin with a prefix, each written whole."""

    def __init__(self, stream, prefix: str):
        self.prefix = prefix
        self._stream, self._begun = stream, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self.prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self):
        self._stream.flush()

    def fileno(self):
        return self._stream.fileno()


def _speak_as(rank: int, count: int) -> None:
    sys.stdout.flush()
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the rest of the process)
    sys.stderr = RankedLines(sys.stderr, f"[rank {rank}/{count}] ")


def _say(text: str, rank: int | None = None) -> None:
    """On standard output by rank 0, on standard error by others and by those who do not know their rank yet."""
    print(text, file=sys.stdout if rank == 0 else sys.stderr, flush=True)
