"""Where compiled programs are kept, and that a place which cannot hold them is a line and no failure."""

import jax
import jax.numpy as jnp
import pytest

from diffjax import compile_cache as module
from diffjax.compile_cache import cache_folder, compile_cache, instruction_set


@pytest.fixture
def no_cache():
    """JAX without a cache of its own, as in a user's process."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    run = tmp_path / "run"
    assert cache_folder("auto", run, "tpu", 1) == tmp_path / "xdg" / "diffjax" / "compile"
    assert cache_folder("auto", run, "tpu", 4) == run / "compile_cache"  # all hosts read it
    assert cache_folder(str(tmp_path / "here"), run, "gpu", 4) == tmp_path / "here"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("auto", run, "gpu", 1) == tmp_path / "home" / ".cache" / "diffjax" / "compile"
    assert cache_folder("~/x", run, "gpu", 1) == tmp_path / "home" / "x"
    mine = cache_folder("auto", run, "cpu", 1)
    assert mine.name == f"cpu-{instruction_set()}"
    monkeypatch.setattr(module, "instruction_set", lambda: "another")  # machine code of another processor
    assert cache_folder("auto", run, "cpu", 1) != mine


def compile_something(number: int):
    jax.jit(lambda x: x * number + 0.5).lower(jax.ShapeDtypeStruct((number,), jnp.float32)).compile()


def test_programs_are_kept_inside_and_nowhere_after(tmp_path, no_cache):
    names = ("jax_compilation_cache_dir", *module.SETTINGS)
    before = [getattr(jax.config, name) for name in names]
    with compile_cache(str(tmp_path), tmp_path) as folder:
        compile_something(11)
        kept = list(folder.iterdir())
        assert len(kept) == 1 and folder.parent == tmp_path
    compile_something(12)
    assert list(folder.iterdir()) == kept
    assert [getattr(jax.config, name) for name in names] == before


def test_off_and_a_folder_that_jax_was_told(tmp_path, no_cache):
    with compile_cache("off", tmp_path) as folder:
        assert folder is None and jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with compile_cache("auto", tmp_path) as folder:
        assert folder is None and jax.config.jax_compilation_cache_dir == str(tmp_path / "own")


def test_a_folder_that_cannot_be_made_or_written_is_one_line(tmp_path, no_cache, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    with compile_cache(str(tmp_path / "file"), tmp_path) as folder:
        compile_something(13)
    assert folder is None
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no compile cache:" in error and "training.compile_cache" in error
    monkeypatch.setattr("os.access", lambda *_: False)  # for root every folder is writable
    with compile_cache(str(tmp_path / "read_only"), tmp_path) as folder:
        compile_something(14)
    assert folder is None and "not writable" in capsys.readouterr().err
