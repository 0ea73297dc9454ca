"""Checkpoints of a run: saving, choosing, checking and restoring them. The only caller of Orbax.

On disk a state is a nested dict keyed by the leaves' paths; beside it lies `meta`: shape, dtype and digest of every
leaf, the resolved config, versions, tokens seen. Step N = N updates done = the state before batch N.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from diffjax.config import CheckpointConfig
from diffjax.errors import StuckSave, UserError
from diffjax.parallel import distributed
from diffjax.parallel.mesh import leaf_path

FORMAT = 1
ITEMS = {"state", "meta"}
SAVE_TIMEOUT_S = 1200


class Restored(NamedTuple):
    state: dict
    step: int
    meta: dict
    source: str  # the folder it was read from


class DamagedError(Exception):
    """A checkpoint that was written whole can no longer be read, or its numbers are not the ones that were saved."""


class Mismatch(UserError):
    """A good checkpoint of something else: never a reason to try an older one."""


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Preemption is the loop's business; polling the service here as well could lose its signal."""
        return False


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs incomplete folders, and failures with a traceback for each thread; this file says it in a sentence."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname


logging.getLogger("absl").addFilter(_not_of_orbax)


class Checkpoints:
    """The checkpoints in one folder. One save is in flight at most; diffjax, not Orbax, decides when to save."""

    def __init__(self, folder, config: CheckpointConfig | None = None, *, report: Callable[[str], None] = print):
        """`config` None opens the folder for reading only."""
        self.folder = Path(folder).absolute()
        self.report = report
        self.writable = config is not None
        self.allow_cast = config is not None and config.allow_cast
        if config is None and not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder of checkpoints")
        if config is None:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=config.keep_last,
                keep_period=config.keep_every,
                cleanup_tmp_directories=True,  # what killed saves left; each is as large as a checkpoint
                async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S),
            )
        self._manager = _Manager(self.folder, options=options)
        self._saving: int | None = None  # the step whose save is in flight
        self._bytes = 0  # of its state

    def save(self, step: int, state: dict, meta: dict, *, wait: bool = False) -> bool:
        """Start writing `state` as checkpoint `step`; False if it is there already. `wait` returns when it is on disk.

        The state may be donated to the next step at once. `meta` is any JSON object; the leaves' description is added.
        Raises what `check` raises, for this save and for the one before.
        """
        self._finish()  # before anything of this save: an older checkpoint may go only when the newer one is whole
        flat = flatten(state)
        saved = step not in self._manager.all_steps()
        if saved:
            digests = jax.device_get(_digests(flat))
            leaves = {
                path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "digest": int(digests[path])}
                for path, leaf in flat.items()
            }
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave(_nest(flat)),
                meta=ocp.args.JsonSave({**meta, "format": FORMAT, "step": step, "leaves": leaves}),
            )
            self._saving, self._bytes = step, sum(leaf.nbytes for leaf in flat.values())
            with self._told():
                self._manager.save(step, args=items, force=True)
        if wait:
            self._finish()
        return saved

    def check(self) -> None:
        """Raise if the save in flight has failed; never waits.

        UserError where the system refused (disk full, no right, no answer in time); older checkpoints stay whole.
        """
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self._finish()

    def _finish(self) -> None:
        if self._saving is not None:
            with self._told():
                self._manager.wait_until_finished()
            self._saving = None

    @contextlib.contextmanager
    def _told(self):
        """Turns the failure of a save into a sentence, and takes what was written of it off the disk."""
        try:
            yield
        except Exception as error:
            step, self._saving = self._saving, None
            for leftover in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
            written = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]
            good = f"the last good one is of step {max(written)}" if written else "there is none before it"
            text = f"checkpoint {self.folder / str(step)} could not be written, {good}: {{}}"
            if (refusal := _refusal(error)) is None:
                raise RuntimeError(text.format(_first_line(error))) from error
            free = shutil.disk_usage(self.folder).free
            need = f"it needs up to {self._bytes:,} bytes, and {free:,} are free in {self.folder}"
            kind = StuckSave if isinstance(error, TimeoutError) else UserError
            raise kind(f"{text.format(refusal)} ({need})") from error

    def complete_steps(self) -> list[int]:
        """Steps that were written to the end, ascending; no leftovers of killed saves, no bare folders.

        As process 0 sees the folder: all processes of a run must choose the same.
        """
        return distributed.from_first(
            lambda: sorted(step for step in self._manager.all_steps() if self._is_complete(step))
        )

    def _is_complete(self, step: int) -> bool:
        metadata = self._manager.metadata(step)
        items = metadata.item_metadata
        return metadata.commit_timestamp_nsecs is not None and items is not None and set(items.keys()) >= ITEMS

    def read_meta(self, step: int) -> dict:
        """The `meta` of a complete checkpoint. Raises DamagedError."""

        def read():
            try:
                return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
            except Exception as error:
                text = f"{self.folder / str(step)}: its meta cannot be read: {_first_line(error)}"
                raise DamagedError(text) from error

        meta = distributed.together(read, DamagedError)
        if not isinstance(meta, dict) or not {"format", "step", "leaves"} <= set(meta):
            raise DamagedError(f"{self.folder / str(step)}: its meta lacks what a checkpoint's meta holds")
        if meta["format"] != FORMAT:
            raise Mismatch(f"{self.folder / str(step)}: format {meta.get('format')}, this diffjax reads {FORMAT}")
        return meta

    def newest_meta(self) -> dict | None:
        """The meta of the newest complete checkpoint that can be read; None when none was written to its end.

        Raises UserError when there are some and none can be read.
        """
        damage = None
        for step in reversed(self.complete_steps()):
            try:
                return self.read_meta(step)
            except DamagedError as error:
                damage = damage or error
        if damage is not None:
            raise UserError(f"no checkpoint in {self.folder} can be read; the newest: {damage}")
        return None

    def restore(self, target: dict, *, step: int | None = None) -> Restored | None:
        """Read the newest good checkpoint, or exactly `step`, into the shapes, dtypes and shardings of `target`.

        target: a state, or a part of one (whole top-level entries such as {"params": ...}), of ShapeDtypeStruct leaves
        with shardings. Incomplete checkpoints are passed over with a line each, damaged ones with an error line if an
        older one works; None when nothing complete is there. Raises UserError when nothing can be read, when `step` is
        missing, and `Mismatch` when tree, shape or dtype differ.
        """
        complete = self.complete_steps()
        if step is not None:
            self.require(step)
            try:
                return self._read(step, target)
            except DamagedError as error:
                raise UserError(str(error)) from error
        for other in sorted(set(self._manager.all_steps()) - set(complete), reverse=True):
            self.report(f"checkpoint {self.folder / str(other)} is incomplete and is passed over")
        damage = None
        for number in reversed(complete):
            try:
                restored = self._read(number, target)
            except DamagedError as error:
                damage = damage or error
                self.report(f"ERROR: {error}")
                continue
            self._move_aside(above=number)
            return restored
        if damage is not None:
            raise UserError(f"no checkpoint in {self.folder} can be read; the newest: {damage}")
        self._move_aside(above=-1)
        return None

    def require(self, step: int) -> None:
        """Raises UserError when `step` is not there in full."""
        complete = self.complete_steps()
        if step not in complete:
            have = ", ".join(map(str, complete)) or "none"
            raise UserError(f"{self.folder}: has no complete checkpoint of step {step}; complete: {have}")

    def compare(self, meta: dict, target: dict) -> None:
        """Raises `Mismatch` when `target` (see `restore`) is not what the checkpoint with this meta holds."""
        self._compare(meta["leaves"], flatten(target), set(target))

    def _read(self, step: int, target: dict) -> Restored:
        started = time.monotonic()
        meta = self.read_meta(step)
        wanted = flatten(target)
        saved = meta["leaves"]
        self.compare(meta, target)
        # Read with the saved dtype: Orbax would convert silently.
        exact = {
            path: jax.ShapeDtypeStruct(leaf.shape, saved[path]["dtype"], sharding=leaf.sharding)
            for path, leaf in wanted.items()
        }
        item = _nest(exact)
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )

        def read():
            try:
                return flatten(self._manager.restore(step, args=ocp.args.Composite(state=arguments)).state)
            except Exception as error:
                raise DamagedError(f"{self.folder / str(step)}: cannot be read: {_first_line(error)}") from error

        flat = distributed.together(read, DamagedError)
        digests = jax.device_get(_digests(flat))
        for path in wanted:
            if int(digests[path]) != saved[path]["digest"]:
                raise DamagedError(
                    f"{self.folder / str(step)}: {path}: the numbers read are not the numbers saved (digest differs)"
                )
        flat = {path: leaf.astype(wanted[path].dtype) for path, leaf in flat.items()}
        leaves = jax.tree_util.tree_map_with_path(lambda path, _: flat[leaf_path(path)], target)
        self.report(f"restored {self.folder / str(step)} in {time.monotonic() - started:.1f} s")
        return Restored(leaves, step, meta, str(self.folder / str(step)))

    def _compare(self, saved: dict, wanted: dict, entries: set[str]) -> None:
        problems = []
        for path in sorted(set(wanted) | {path for path in saved if path.split("/")[0] in entries}):
            if path not in saved:
                problems.append(f"{path}: missing in the checkpoint")
            elif path not in wanted:
                problems.append(f"{path}: in the checkpoint, but the config's model has no such leaf")
            elif tuple(saved[path]["shape"]) != wanted[path].shape:
                problems.append(f"{path}: checkpoint {saved[path]['shape']}, config {list(wanted[path].shape)}")
            elif saved[path]["dtype"] != str(wanted[path].dtype) and not self.allow_cast:
                problems.append(
                    f"{path}: checkpoint {saved[path]['dtype']}, config {wanted[path].dtype}; "
                    "set checkpoint.allow_cast=true to convert"
                )
        if problems:
            rest = f"\n... and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise Mismatch("\n".join(problems[:10]) + rest)

    def _move_aside(self, above: int) -> None:
        """Take unreadable and incomplete checkpoints newer than the restored one out of the way of later saves."""
        newer = distributed.from_first(lambda: [step for step in self._manager.all_steps() if step > above])
        if not newer or not self.writable:
            return

        def move():
            for step in newer:
                place = self.folder.parent / "damaged_checkpoints" / f"{step}-{time.time_ns()}"
                place.parent.mkdir(exist_ok=True)
                shutil.move(self.folder / str(step), place)
                self.report(f"moved {self.folder / str(step)} to {place}")

        distributed.from_first(move)
        self._manager.reload()

    def close(self) -> None:
        """Wait for the save in flight and let go of the folder."""
        try:
            self._finish()
        finally:
            self._manager.close()


def flatten(tree) -> dict:
    """Leaf path -> leaf, in tree order."""
    return {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _nest(flat: dict) -> dict:
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def digest(leaf: jax.Array) -> jax.Array:
    """A uint32 fingerprint of an array's bits and their places, the same on every mesh: an integer sum has no order.

    Each 32-bit word is xored with its place times the golden ratio and mixed (the finalizer of MurmurHash3), so that a
    flipped bit, a swap of two elements and a shift all change it.
    """
    bits = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    width = bits.dtype.itemsize
    words = jax.lax.bitcast_convert_type(bits, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)).astype(jnp.uint32)
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    mixed = words ^ (place * jnp.uint32(0x9E3779B9) + jnp.uint32(0x85EBCA6B))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


@jax.jit
def _digests(flat: dict) -> dict:
    return {path: digest(leaf) for path, leaf in flat.items()}


def _refusal(error: BaseException | None) -> str | None:
    """Why the system, not a program, made a save fail: the reason of an OSError or a time-out in the error's chain.

    TensorStore gives the system's error in the text of a ValueError alone: `... [os_error_code='28']`.
    """
    while error is not None:
        if isinstance(error, TimeoutError):
            return f"it took more than {SAVE_TIMEOUT_S} s"
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno)
        if number := re.search(r"os_error_code='(\d+)'", str(error)):
            return os.strerror(int(number[1]))
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"
