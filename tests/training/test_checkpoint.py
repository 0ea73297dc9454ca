"""Checkpoints: bit-exact on any mesh, damage and leftovers never chosen, mismatches named."""

import errno
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diffjax.config import CheckpointConfig, MeshConfig
from diffjax.errors import StuckSave, UserError
from diffjax.parallel.mesh import make_mesh
from diffjax.training.checkpoint import Checkpoints, Mismatch, digest
from diffjax.training.memory import memory_metrics


def on(devices: int):
    mesh = make_mesh(MeshConfig(data=1, fsdp=devices), jax.devices()[:devices])
    return lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))


def make_state(seed=0, place=None):
    place = place or on(1)
    draw = np.random.default_rng(seed)
    kernel = draw.normal(size=(16, 24)).astype(np.float32)
    return {
        "step": jax.device_put(jnp.int32(seed), place()),
        "params": {
            "mlp": {"kernel": jax.device_put(kernel, place("fsdp"))},
            "scale": jax.device_put(kernel[0], place()),
        },
        "guard": (jax.device_put(jnp.zeros(4), place()), jax.device_put(jnp.int32(3), place())),
    }


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def fill(folder, steps=(10, 20, 30), **config):
    """Checkpoints whose contents differ from step to step."""
    store = Checkpoints(folder, CheckpointConfig(**config))
    for step in steps:
        store.save(step, make_state(step), {"note": step})
    store.close()


def data_files(folder):
    """The files that hold numbers, largest first."""
    files = [path for path in (folder / "state").rglob("*") if path.parent.name == "d"]
    return sorted(files, key=lambda path: -path.stat().st_size)


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("before, after", [(8, 2), (2, 1), (1, 8)])
def test_restores_bit_for_bit_onto_another_mesh(tmp_path, before, after):
    state = make_state(3, on(before))
    store = Checkpoints(tmp_path / "c", CheckpointConfig())
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=before), jax.devices()[:before])):
        assert store.save(3, state, {"tokens_seen": 2**40}, wait=True)
    target = make_state(0, on(after))
    restored = Checkpoints(tmp_path / "c", CheckpointConfig()).restore(abstract(target))
    assert (restored.step, restored.meta["tokens_seen"]) == (3, 2**40)
    assert restored.source.endswith("c/3")
    assert_same(restored.state, state)
    for leaf, like in zip(jax.tree.leaves(restored.state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == like.sharding


def test_digest_depends_on_bits_and_places_and_not_on_the_mesh():
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    one = int(digest(jnp.asarray(values)))
    assert int(jax.jit(digest)(jax.device_put(values, on(8)("fsdp")))) == one
    flipped = values.copy()
    flipped.view(np.uint32)[3, 3] ^= 1
    swapped = values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    others = [int(digest(jnp.asarray(other))) for other in (flipped, swapped, values.T, np.roll(values, 1))]
    assert len({one, *others}) == 5
    for dtype in (jnp.bfloat16, jnp.int32, jnp.bool_, jnp.uint8):
        array = jnp.asarray(values > 7).astype(dtype)
        assert int(digest(array)) != int(digest(array.at[0, 0].set(array.dtype.type(1))))


def test_an_existing_step_is_not_saved_twice(tmp_path):
    store = Checkpoints(tmp_path / "c", CheckpointConfig())
    assert store.save(5, make_state(5), {}, wait=True)
    assert not store.save(5, make_state(6), {}, wait=True)
    assert store.save(2, make_state(2), {}, wait=True)  # an older step is not dropped
    assert store.complete_steps() == [2, 5]


def test_retention(tmp_path):
    fill(tmp_path / "c", range(1, 8), keep_last=2, keep_every=4)
    assert Checkpoints(tmp_path / "c").complete_steps() == [4, 6, 7]


def test_state_may_be_overwritten_right_after_save(tmp_path):
    state = make_state(1)
    want = jax.tree.map(np.asarray, state)
    store = Checkpoints(tmp_path / "c", CheckpointConfig())
    store.save(1, state, {})
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state))
    store.close()
    assert_same(jax.tree.map(np.asarray, Checkpoints(tmp_path / "c").restore(abstract(make_state())).state), want)


def test_leftovers_and_incomplete_folders_are_never_chosen(tmp_path):
    folder = tmp_path / "c"
    fill(folder)
    (folder / "40").mkdir()
    (folder / "50.orbax-checkpoint-tmp").mkdir()
    (folder / "30" / "_CHECKPOINT_METADATA").unlink()
    lines = []
    store = Checkpoints(folder, CheckpointConfig(), report=lines.append)
    restored = store.restore(abstract(make_state()))
    assert restored.step == 20
    assert_same(restored.state, make_state(20))
    for step in (30, 40):
        assert any(f"c/{step} is incomplete" in line for line in lines)
    for step in (30, 40):  # their numbers are free again
        assert store.save(step, make_state(step), {}, wait=True)
    assert store.restore(abstract(make_state())).step == 40
    assert len(list((tmp_path / "damaged_checkpoints").iterdir())) == 2


def test_only_incomplete_ones_means_from_scratch(tmp_path):
    (tmp_path / "c" / "40").mkdir(parents=True)
    store = Checkpoints(tmp_path / "c", CheckpointConfig())
    assert store.restore(abstract(make_state())) is None
    assert store.save(40, make_state(), {}, wait=True)


def test_damage_falls_back_and_is_an_error_when_nothing_older_works(tmp_path):
    folder = tmp_path / "c"
    fill(folder)
    shutil.copytree(folder, tmp_path / "alone")
    for step in (10, 20):
        shutil.rmtree(tmp_path / "alone" / str(step))
    truncated = data_files(folder / "30")[0]
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 3])
    lines = []
    assert Checkpoints(folder, CheckpointConfig(), report=lines.append).restore(abstract(make_state())).step == 20
    assert any(line.startswith("ERROR") and "c/30" in line for line in lines)
    truncated = data_files(tmp_path / "alone" / "30")[0]
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 3])
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        Checkpoints(tmp_path / "alone", CheckpointConfig()).restore(abstract(make_state()))


@pytest.mark.parametrize("content", ["[]", "{", '{"format": 1, "step": 30}'])
def test_a_damaged_meta_falls_back_and_is_an_error_when_nothing_older_works(tmp_path, content):
    fill(tmp_path / "c")
    store = Checkpoints(tmp_path / "c")
    (tmp_path / "c" / "30" / "meta" / "metadata").write_text(content)
    assert store.newest_meta()["step"] == 20
    for step in (10, 20):
        (tmp_path / "c" / str(step) / "meta" / "metadata").write_text(content)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read; the newest: .*30: its meta"):
        store.newest_meta()


def test_no_flipped_byte_restores_silently(tmp_path):
    """Orbax alone returns wrong numbers for about one flip in four; with the digest every one is noticed."""
    fill(tmp_path / "c", (1,))
    target, want = abstract(make_state()), make_state(1)
    noticed = 0
    for number, path in enumerate(data_files(tmp_path / "c" / "1")[:3] * 4):
        whole = path.read_bytes()
        place = len(whole) * (2 * number + 1) // 24
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            assert_same(Checkpoints(tmp_path / "c").restore(target).state, want)  # a byte that carries no number
        except UserError:
            noticed += 1
        path.write_bytes(whole)
    assert noticed >= 3


def test_digest_alone_notices_wrong_numbers(tmp_path, monkeypatch):
    """The numbers differ from the saved ones although every file reads well."""
    store = Checkpoints(tmp_path / "c", CheckpointConfig())
    store.save(1, make_state(1), {}, wait=True)
    real = store.read_meta

    def tampered(step):
        meta = real(step)
        meta["leaves"]["params/scale"]["digest"] ^= 1
        return meta

    monkeypatch.setattr(store, "read_meta", tampered)
    with pytest.raises(UserError, match=r"params/scale: the numbers read are not the numbers saved"):
        store.restore(abstract(make_state()), step=1)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s["params"].pop("scale"), "params/scale: in the checkpoint, but the config's model has no such"),
        (lambda s: s["params"].update(bias=s["params"]["scale"]), "params/bias: missing in the checkpoint"),
        (lambda s: s["params"].update(scale=jnp.zeros(7)), r"params/scale: checkpoint \[24\], config \[7\]"),
        (
            lambda s: s["params"].update(scale=s["params"]["scale"].astype(jnp.bfloat16)),
            "params/scale: checkpoint float32, config bfloat16; set checkpoint.allow_cast=true to convert",
        ),
    ],
)
def test_mismatch_names_the_leaf_and_is_no_reason_to_fall_back(tmp_path, change, message):
    fill(tmp_path / "c", (1, 2))
    target = make_state()
    change(target)
    with pytest.raises(Mismatch, match=message):
        Checkpoints(tmp_path / "c", CheckpointConfig()).restore(abstract(target))


def test_cast_when_asked(tmp_path):
    fill(tmp_path / "c", (1,))
    target = make_state(1)
    target["params"]["scale"] = target["params"]["scale"].astype(jnp.bfloat16)
    restored = Checkpoints(tmp_path / "c", CheckpointConfig(allow_cast=True)).restore(abstract(target))
    assert_same(restored.state, target)


def test_part_of_a_state_and_one_given_step(tmp_path):
    fill(tmp_path / "c")
    store = Checkpoints(tmp_path / "c")
    part = store.restore({"params": abstract(make_state())["params"]}, step=20)
    assert set(part.state) == {"params"}
    assert_same(part.state["params"], make_state(20)["params"])
    with pytest.raises(UserError, match="no complete checkpoint of step 25; complete: 10, 20, 30"):
        store.restore(abstract(make_state()), step=25)
    with pytest.raises(UserError, match="no such folder"):
        Checkpoints(tmp_path / "nowhere")


def fail_writing(monkeypatch, error):
    """Every array that is written from here on fails so, in Orbax's own threads."""

    async def write(*args, **keywords):
        raise error

    monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization.async_serialize_from_host", write)


def until_over(store):
    while store._manager.is_saving_in_progress():
        time.sleep(0.01)


@pytest.mark.parametrize(
    "error, kind, reason",
    [
        (ValueError("RESOURCE_EXHAUSTED: ... [os_error_code='28']"), UserError, "No space left on device"),
        (OSError(errno.EROFS, "x"), UserError, "Read-only file system"),
        (TimeoutError("slow"), StuckSave, "it took more than 1200 s"),
        (ZeroDivisionError("a bug"), RuntimeError, "ZeroDivisionError: a bug"),
    ],
)
def test_a_failed_save_is_told_at_the_next_look_and_costs_no_older(tmp_path, monkeypatch, caplog, error, kind, reason):
    folder = tmp_path / "c"
    store = Checkpoints(folder, CheckpointConfig(keep_last=1))
    store.save(1, make_state(1), {}, wait=True)
    store.check()
    fail_writing(monkeypatch, error)
    store.save(2, make_state(2), {})
    until_over(store)
    with pytest.raises(kind) as told:
        store.check()
    text = str(told.value)
    assert text.startswith(f"checkpoint {folder / '2'} could not be written, the last good one is of step 1: {reason}")
    room = f"it needs up to [0-9,]+ bytes, and [0-9,]+ are free in {folder}"
    assert kind is RuntimeError or re.search(room, text)
    assert type(told.value) is kind
    store.check()  # once told, it is over
    store.close()
    assert [path.name for path in folder.iterdir()] == ["1"]
    assert_same(Checkpoints(folder).restore(abstract(make_state())).state, make_state(1))
    assert not caplog.records  # nor does Orbax say it in its own way, once for each thread


@pytest.mark.parametrize("look", [lambda store: store.save(3, make_state(3), {}), Checkpoints.close])
def test_a_failed_save_is_told_by_the_next_save_and_by_closing(tmp_path, monkeypatch, look):
    store = Checkpoints(tmp_path / "c", CheckpointConfig())
    fail_writing(monkeypatch, OSError(errno.ENOSPC, "x"))
    store.save(2, make_state(2), {})
    with pytest.raises(UserError, match=r"2 could not be written, there is none before it: No space left on device"):
        look(store)


def test_what_a_killed_save_left_is_removed(tmp_path):
    fill(tmp_path / "c", (1,))
    (tmp_path / "c" / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    Checkpoints(tmp_path / "c").close()  # reading changes nothing
    assert (tmp_path / "c" / "5.orbax-checkpoint-tmp").exists()
    fill(tmp_path / "c", (2,))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["1", "2"]


def test_host_memory_does_not_grow_with_saves(tmp_path):
    """A leak of the copy that a save makes would be 8 MiB a save."""
    store = Checkpoints(tmp_path / "c", CheckpointConfig(keep_last=2))
    resident, add = [], jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros((2**21,), jnp.float32)
    for step in range(30):
        array = add(array)
        store.save(step, {"params": {"w": array}}, {})
        resident.append(memory_metrics()["memory/host_bytes"])
    store.close()
    slope = np.polyfit(np.arange(20), np.array(resident[10:]) / 2**20, 1)[0]
    assert slope < 1, resident
