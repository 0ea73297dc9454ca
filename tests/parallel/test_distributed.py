"""What processes tell each other, with one process and with a coordinator made of a dictionary and threads."""

import io
import itertools
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from diffjax.config import DistributedConfig, MeshConfig
from diffjax.errors import UserError
from diffjax.parallel import distributed
from diffjax.parallel.mesh import batch_sharding, make_mesh, place_whole, to_host


def test_every_helper_works_alone(capsys):
    distributed.start(DistributedConfig(mode="none"))
    assert capsys.readouterr().out == "one process: distributed.mode=none\n"
    assert (distributed.rank(), distributed.process_count()) == (0, 1)
    assert distributed.gather("here") == ["here"]
    assert distributed.from_first(lambda: [1]) == [1] and distributed.together(lambda: 2) == 2
    with pytest.raises(UserError, match=r"^no$"):
        distributed.together(lambda: (_ for _ in ()).throw(UserError("no")))
    distributed.agree({"a": 1})
    assert distributed.leave(75, together=True) == 75


class Store:
    """The coordinator's key-value store; keys are written once."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values and isinstance(value, str)
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")
            return self.values[key]


class EachThread(threading.local):
    """Stands for the module's group; every thread sees its own."""

    def __init__(self):
        self.group = None

    def __getattr__(self, name):
        return getattr(self.group, name)


@pytest.fixture
def three(monkeypatch):
    """run(function): what function(rank) returns or raises on each of three threads that take each other for ranks."""
    groups, store, counters = EachThread(), Store(), [itertools.count() for _ in range(3)]
    monkeypatch.setattr(distributed, "_group", groups)
    monkeypatch.setattr(distributed, "WAIT_SLICE_MS", 20)

    def run(function):
        results = [None] * 3

        def one(rank):
            groups.group = distributed._Group(rank, 3, store, 1, "", None, calls=counters[rank])
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return results

    return run


def test_gather_and_from_first(three):
    def talk(rank):
        first = distributed.gather(f"a{rank}")
        shared = distributed.from_first(lambda: {"rank": rank})
        return first, shared, distributed.gather(str(rank))

    assert three(talk) == [(["a0", "a1", "a2"], {"rank": 0}, ["0", "1", "2"])] * 3


def test_an_error_of_one_is_raised_by_all(three):
    def fail(error):
        raise error

    told = three(lambda rank: distributed.from_first(lambda: fail(UserError("no corpus"))))
    assert [(type(error), str(error)) for error in told] == [(UserError, "no corpus")] * 3
    told = three(lambda rank: distributed.from_first(lambda: fail(OSError("full"))))
    assert [type(error) for error in told] == [OSError, RuntimeError, RuntimeError]
    told = three(lambda rank: distributed.together(lambda: fail(UserError("unseen")) if rank == 2 else rank))
    assert [(type(error), str(error)) for error in told] == [(UserError, "rank 2: unseen")] * 3
    assert three(lambda rank: distributed.together(lambda: rank)) == [0, 1, 2]


def test_agree_names_rank_and_key(three):
    assert three(lambda rank: distributed.agree({"jax": "1", "x": [1, None]})) == [None] * 3
    told = three(lambda rank: distributed.agree({"jax": "1", "steps": 8 if rank == 1 else 9}))
    assert {str(error) for error in told} == {
        "rank 1: steps=8, but 9 on rank 0. All processes of a run must start with the same"
    }


def test_a_coordinator_that_does_not_answer():
    with pytest.raises(UserError, match=r"^coordinator 127.0.0.1:1 not reachable within 0.3 s"):
        distributed._reach("127.0.0.1:1", 0.3)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match="Address already in use"):
            distributed._check_port(f"localhost:{port}")
    distributed._check_port(f"localhost:{port}")


def test_lines_say_their_rank():
    stream = io.StringIO()
    lines = distributed.RankedLines(stream, "[rank 1/2] ")
    print("one\ntwo", file=lines)
    print("thr", end="", file=lines)
    assert stream.getvalue() == "[rank 1/2] one\n[rank 1/2] two\n"
    print("ee", file=lines)
    assert stream.getvalue().endswith("[rank 1/2] three\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), 9)", "second\n"),
        ("os.abort()", "second\n"),
        ("words.cancel()", ""),
        ("subprocess.run(['kill', '-TERM', str(words._shell.pid)]); os._exit(3)", "second\n"),
    ],
)
def test_last_words_are_said_by_those_who_die(tmp_path, end, said):
    code = (
        "import os, subprocess\nfrom diffjax.parallel.distributed import LastWords\n"
        f"words = LastWords('first')\nwords.change('second')\nimport time; time.sleep(0.3)\n{end}"
    )
    with open(tmp_path / "log", "w") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, timeout=60)
    for _ in range(50):
        if (tmp_path / "log").read_text() == said:
            break
        threading.Event().wait(0.1)
    assert (tmp_path / "log").read_text() == said


def test_host_arrays_go_to_the_mesh_and_back():
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    values = {"a": np.arange(16).reshape(8, 2), "b": np.arange(8)}
    placed = place_whole(values, batch_sharding(mesh))
    assert placed["a"].sharding == batch_sharding(mesh)
    for name, value in values.items():
        np.testing.assert_array_equal(to_host(placed[name]), value)
