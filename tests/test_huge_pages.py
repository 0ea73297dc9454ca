"""A command that runs a model starts itself again for huge pages: once, with its arguments, in the same process."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from diffjax import huge_pages

CODE = """
import os, sys, types
from pathlib import Path
from diffjax import cli, huge_pages
huge_pages.KERNEL_SWITCH = Path(sys.argv[1])
print("start", os.getpid(), os.environ.get("GLIBC_TUNABLES"), flush=True)
run = types.ModuleType("diffjax.run")
run.train = lambda config, resume_command: print("train", os.getpid(), config.training.steps)
sys.modules["diffjax.run"] = run
sys.argv = ["diffjax", *sys.argv[2:]]
sys.exit(cli.main())
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is of the GNU C library")


def command(switch, *arguments, tunables=None):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    words = [sys.executable, "-c", CODE, str(switch), *arguments]
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent.parent)


@pytest.fixture
def switch(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    return path


@needs_glibc
def test_it_starts_again_once_as_the_same_process(switch):
    done = command(switch, "train", "configs/quickstart.yaml", "training.steps=123")
    first, second, train = (line.split() for line in done.stdout.splitlines())
    assert first[1] == second[1] == train[1]
    assert (first[2], second[2], train[2]) == ("None", huge_pages.SETTING, "123")
    assert done.stderr == f"starting again with GLIBC_TUNABLES={huge_pages.SETTING}: huge pages make CPU steps faster\n"


@needs_glibc
def test_a_wrong_command_ends_before(switch):
    done = command(switch, "train", "configs/quickstart.yaml", "training.steps=-1")
    assert done.returncode == 2 and done.stdout.count("start") == 1 and "starting again" not in done.stderr


@pytest.mark.parametrize("text", ["[always] madvise never\n", "always madvise [never]\n"])
def test_it_stays_where_the_kernel_does_not_ask(switch, text):
    switch.write_text(text)
    done = command(switch, "train", "configs/quickstart.yaml")
    assert done.stdout.count("start") == 1 and "train" in done.stdout


def test_it_leaves_the_user_s_own_settings(switch):
    done = command(switch, "train", "configs/quickstart.yaml", tunables="glibc.malloc.hugetlb=0")
    assert "glibc.malloc.hugetlb=0" in done.stdout and done.stdout.count("start") == 1
