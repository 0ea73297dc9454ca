"""The watchdog, in processes of its own: a hang ends them with the stacks and exit code 1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEADER = """
import ctypes, sys, time
from diffjax.training import watchdog
watchdog.GRACE_S = 1
dog = watchdog.Watchdog(1)
def hang():
    {hang}
"""

HANGING = HEADER + "dog.start()\nhang()\n"

WATCHED = (
    HEADER
    + """
dog.start()
for _ in range(12):
    time.sleep(0.2)
    dog.beat()
dog.close()
time.sleep(2.5)
"""
)

# A run whose step takes longer to compile than the watchdog waits, and whose third batch never comes.
TRAINING = """
import sys, time
import tests.conftest
from pathlib import Path
from diffjax.training.loop import fit
from tests.training.toy import make_config, make_draw, make_job, read_rows
def blocked(step, numbers):
    if step == 3:
        print("hangs", flush=True)
        time.sleep(60)
    return read_rows(step, numbers)
config = make_config(sys.argv[1], training__watchdog_s=2)
def slow_to_compile(step, batch):
    time.sleep(2.5)
    return make_draw(config)(step, batch)
fit(make_job(config, read_rows=blocked, draw_noise=slow_to_compile))
"""


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "hang, sentence",
    [
        ("time.sleep(60)", "no step, evaluation batch or save ended for 1 s (training.watchdog_s)"),
        ("ctypes.PyDLL(None).sleep(60)", "Timeout"),  # keeps the interpreter's lock: no thread of Python can run
    ],
)
def test_a_hang_ends_the_process_with_its_stacks(hang, sentence):
    done = run(HANGING.format(hang=hang))
    assert done.returncode == 1, done.stderr
    assert sentence in done.stderr and "in hang" in done.stderr


@pytest.mark.multiprocess
def test_what_goes_on_or_is_over_is_left_alone():
    done = run(WATCHED.format(hang="pass"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.multiprocess
def test_a_run_is_watched_from_its_loop_on(tmp_path):
    done = run(TRAINING, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "hangs" in done.stdout and "no step, evaluation batch or save ended for 2 s" in done.stderr
    assert "in blocked" in done.stderr
