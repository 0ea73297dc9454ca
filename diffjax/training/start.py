"""Where a run starts from: its own folder, another run's checkpoint, or scratch, in this order; and what forbids it."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from diffjax.config import Config, resume_diff, to_dict
from diffjax.errors import UserError
from diffjax.parallel import distributed
from diffjax.parallel.mesh import init_sharded, place_whole
from diffjax.training.checkpoint import Checkpoints, Mismatch
from diffjax.training.optimizer import make_optimizer
from diffjax.training.step import fresh_state, make_init

# Keys of the model that a new run may change on weights it starts from: how those began, are computed and are cut.
FREE_FOR_OTHER_RUNS = {"model.init_std", "model.block_size", "model.dtype"}


class Start(NamedTuple):
    state: dict
    step: int
    tokens_seen: int
    source: str


def stored_meta(config: Config, identities: dict, say: Callable[[str], None]) -> dict | None:
    """The meta of the checkpoint that the run folder would go on from, compared with this run; None for a new run."""
    folder = Path(config.run.dir) / "checkpoints"
    if not distributed.from_first(folder.is_dir):
        return None
    checkpoints = Checkpoints(folder)
    try:
        meta = checkpoints.newest_meta()
    finally:
        checkpoints.close()
    if meta is not None:
        check_resume(meta, config, identities, config.run.dir, say)
    return meta


def check_resume(meta: dict, config: Config, identities: dict, where: str, say: Callable[[str], None]) -> None:
    """Compare a checkpoint's config and data with this run's: free changes pass, others are told, the rest refused."""
    _, warned, refused = resume_diff(meta["config"], config)
    problems = [f"{key}: {old} -> {new}" for key, old, new in refused]
    problems += [
        f"{key}: {meta.get(key)} -> {value}; a resumed run must see the same rows"
        for key, value in identities.items()
        if meta.get(key) != value
    ]
    if problems:
        raise UserError(
            f"{where} belongs to another run: {'; '.join(problems)}. Choose another run.dir; "
            f"checkpoint.init_from={where} starts a new run there from these weights"
        )
    for key, old, new in warned:
        say(f"changed since the checkpoint: {key}: {old} -> {new}")
    for name, now in package_versions().items():
        if meta["versions"].get(name) != now:
            say(f"changed since the checkpoint: {name} {meta['versions'].get(name)} -> {now}")


def find_start(
    config: Config,
    denoiser,
    target: dict,
    placement: dict,
    checkpoints: Checkpoints,
    identities: dict,
    say: Callable[[str], None],
) -> Start:
    """The state to train from. `target` is the abstract state with shardings, `identities` {"corpus", "tokenizer"}.

    Raises UserError for what `stored_meta` and `check_init_from` did not see yet: numbers that cannot be read.
    """
    restored = checkpoints.restore(target)
    if restored is not None:
        return Start(_calm(restored.state), restored.step, restored.meta["tokens_seen"], restored.source)
    if config.checkpoint.init_from:
        return _from_other_run(config, denoiser, target, placement, identities, say)
    init = make_init(config, denoiser.init, denoiser.logical_axes())
    state = init_sharded(init, placement, jax.random.key(config.run.seed))
    return Start(state, 0, 0, "scratch")


def _calm(state: dict) -> dict:
    """A restored state counts its rejected steps in a row from zero."""
    old = state["guard"].consecutive
    zero = place_whole(np.zeros((), np.int32), old.sharding)
    return {**state, "guard": state["guard"]._replace(consecutive=zero)}


def check_init_from(config: Config, target: dict, identities: dict) -> None:
    """Raises UserError where `checkpoint.init_from` names no checkpoint, or one that this run cannot start from."""
    with _other_run(config, target, identities, lambda text: None) as (other, meta, _, wanted):
        other.compare(meta, wanted)


@contextmanager
def _other_run(
    config: Config, target: dict, identities: dict, say: Callable[[str], None]
) -> Iterator[tuple[Checkpoints, dict, int | None, dict]]:
    """What `checkpoint.init_from` names: (its checkpoints, meta, the step asked for or None, the part to restore)."""
    name, _, step = config.checkpoint.init_from.partition("@")
    if step and not step.isdecimal():
        raise UserError(f"checkpoint.init_from={config.checkpoint.init_from}: expected RUN or RUN@STEP, STEP a number")
    number = int(step) if step else None
    other = Checkpoints(Path(name) / "checkpoints", report=say)
    try:
        if number is not None:
            other.require(number)
        meta = other.newest_meta() if number is None else other.read_meta(number)
        if meta is None:
            raise UserError(f"checkpoint.init_from={name}: no complete checkpoint in {other.folder}")
        if config.checkpoint.init_what == "state":
            check_resume(meta, config, identities, name, say)
            yield other, meta, number, target
        else:
            where = f"checkpoint.init_from={name}"
            check_weights(meta, config, identities["tokenizer"], where, FREE_FOR_OTHER_RUNS)
            yield other, meta, number, {weights_entry(meta): target["params"]}
    finally:
        other.close()


def _from_other_run(config: Config, denoiser, target, placement, identities, say) -> Start:
    with _other_run(config, target, identities, say) as (other, _, number, wanted):
        restored = other.restore(wanted, step=number)
    if config.checkpoint.init_what == "state":
        return Start(_calm(restored.state), restored.step, restored.meta["tokens_seen"], restored.source)
    optimizer = make_optimizer(config.optimizer, denoiser.logical_axes())
    (weights,) = restored.state.values()
    state = init_sharded(lambda params: fresh_state(config, optimizer, params), placement, weights)
    return Start(state, 0, 0, f"weights of {restored.source}")


def weights_entry(meta: dict) -> str:
    """The part of a checkpoint that stands for the model: the averaged weights where the run kept them."""
    return "ema" if any(path.startswith("ema/") for path in meta["leaves"]) else "params"


def check_weights(meta: dict, config: Config, tokenizer: str, where: str, free: Collection[str] = ()) -> None:
    """Refuse (Mismatch) to read a checkpoint's weights as something else than they were trained to be.

    `free` are keys of the model that may differ, `tokenizer` is the identity of the one that the weights will meet.
    """
    _, _, refused = resume_diff(meta["config"], config)
    matter = [
        f"{key}: {old} -> {new}"
        for key, old, new in refused
        if (key.startswith("model.") and key not in free) or key == "data.tail"
    ]
    if meta["tokenizer"] != tokenizer:
        matter.append("the tokenizer differs; give data.tokenizer.path the one in that run's folder")
    if matter:
        raise Mismatch(f"{where}: its weights mean something else: {'; '.join(matter)}")


def package_versions() -> dict[str, str]:
    """Versions of the packages whose behaviour a run depends on."""
    return {name: version(name) for name in ("diffjax", "jax", "optax", "orbax-checkpoint", "grain")}


def describe(config: Config, identities: dict) -> dict:
    """What every checkpoint's meta says about the run it is of."""
    return {"config": to_dict(config), "versions": package_versions(), "run_id": config.run.id, **identities}
