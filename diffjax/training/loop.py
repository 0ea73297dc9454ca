"""The training loop: place, compile, start, then step, evaluate, save, stop. Branches on no model and no hardware."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from diffjax.config import Config, config_hash
from diffjax.data.batch import Batch
from diffjax.errors import GuardStop, Preempted
from diffjax.parallel import mesh as mesh_lib
from diffjax.parallel.chips import peak_flops
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.journal import Journal
from diffjax.training.noise_check import check_noise
from diffjax.training.optimizer import describe as describe_optimizer
from diffjax.training.profile import Profile
from diffjax.training.start import check_init_from, describe, find_start, stored_meta
from diffjax.training.step import compile_step, donated_share, lay_out, make_train_step
from diffjax.training.stop import StopRequest
from diffjax.training.tracking import Progress, Trackers, cut_records
from diffjax.training.watchdog import Watchdog


@dataclass(frozen=True)
class Job:
    """What a run trains on, handed in by the caller so that this file knows no corpus and no evaluation.

    denoiser    offers init(key), logical_axes()
    objective   (params, batch, noise) -> (numerator, denominator, metrics)
    draw_noise  (step, batch) -> noise
    read_rows   (step, row numbers [n]) -> Batch of numpy arrays; a pure function
    batch       the abstract global batch
    evaluate    (params, should_stop) -> record of held-out numbers, or None when it was cut off
    identities  {"corpus": text, "tokenizer": text}, compared on resume
    notes       anything else for the checkpoints' meta
    row_flops   FLOPs of training on one row, or None
    begin       called once the run is known to be able to train, before its first file is written
    """

    config: Config
    mesh: Mesh
    denoiser: object
    objective: Callable
    draw_noise: Callable
    read_rows: Callable[[int, np.ndarray], Batch]
    batch: Batch
    identities: dict[str, str]
    evaluate: Callable[[dict, Callable[[], bool]], dict | None] = lambda params, should_stop: {}
    notes: dict = field(default_factory=dict)
    row_flops: float | None = None
    begin: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    step: int
    state: dict | None  # None: the run was at its last step already and nothing was loaded
    tokens_seen: int


def due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


def fit(job: Job) -> Outcome:
    """Train to `training.steps`. Raises Preempted (asked to stop) and GuardStop with the state saved, and UserError."""
    config, mesh = job.config, job.mesh
    run_dir, steps = Path(config.run.dir), config.training.steps

    axes = job.denoiser.logical_axes()
    abstract, placement, whole = lay_out(config, job.denoiser, mesh)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, placement
    )

    with StopRequest() as stop, jax.set_mesh(mesh):
        checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint)
        try:
            meta = stored_meta(config, job.identities, print)
            if meta is not None and meta["step"] >= steps:
                print(f"already at step {meta['step']} of {steps}; a larger training.steps continues")
                return Outcome(meta["step"], None, meta["tokens_seen"])
            if meta is None and config.checkpoint.init_from:
                check_init_from(config, target, job.identities)

            check_noise(job.draw_noise, job.batch, mesh)
            train_step = make_train_step(config, job.objective, job.draw_noise, mesh, placement["params"], axes)
            print(*describe_optimizer(config.optimizer, abstract["params"], axes), sep="\n")
            step_fn = _compile(train_step, abstract, placement, job, whole)
            start = find_start(config, job.denoiser, target, placement, checkpoints, job.identities, print)
            print(f"starting at step {start.step} of {steps} from {start.source}")
            return _run(job, step_fn, start, checkpoints, stop)
        finally:
            checkpoints.close()


def _run(job: Job, step_fn, start, checkpoints: Checkpoints, stop: StopRequest) -> Outcome:
    config, run_dir = job.config, Path(job.config.run.dir)
    training, steps = config.training, config.training.steps
    job.begin()
    for name in ("metrics.jsonl", "rejects.jsonl"):
        cut_records(run_dir / name, start.step)
    trackers = Trackers(config, run_dir, config.run.id)
    progress = Progress(steps, start.step)
    leaf_paths = mesh_lib.paths(start.state["params"])
    journal = Journal(config, run_dir, trackers, progress, leaf_paths, start.tokens_seen, _peak_rows(job))
    profile = Profile(training.profile_steps, run_dir, progress.say)
    watchdog = Watchdog(training.watchdog_s)
    rows = mesh_lib.batch_sharding(job.mesh)
    about = {**job.notes, **describe(config, job.identities), "config_hash": config_hash(config)}
    state, done = start.state, start.step
    del start  # the first step overwrites its buffers

    def save(wait: bool = False):
        checkpoints.save(done, state, {**about, "tokens_seen": journal.tokens_seen}, wait=wait)
        watchdog.beat()

    def poll() -> bool:  # between the batches of an evaluation
        watchdog.beat()
        return stop.poll()

    try:
        watchdog.start()
        while True:
            if due(done, training.evaluate_every, steps):
                journal.drain()
                record = job.evaluate(state.get("ema", state["params"]), poll)
                if record is not None:
                    journal.evaluation(done, record)
            if done > 0 and due(done, training.checkpoint_every, steps):
                journal.drain()
                save()
            if journal.stuck:
                journal.drain()
                save(wait=True)
                text = f"{journal.stuck}. The state of step {done} is saved; see {run_dir / 'rejects.jsonl'}"
                raise GuardStop(text, done, journal.tokens_seen)
            if stop.poll():
                journal.drain()
                save(wait=True)
                text = f"{stop.reason}: stopped at step {done} of {steps}; the state is saved"
                raise Preempted(text, done, journal.tokens_seen)
            if done == steps:
                break
            checkpoints.check()
            profile.before(done, state)
            asked = time.monotonic()
            batch = mesh_lib.global_batch(partial(job.read_rows, done), training.batch_size, rows)
            waited = time.monotonic() - asked
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            journal.send(done, metrics, waited)
            profile.after(done, state)
            watchdog.beat()
            done += 1
        save(wait=True)
        return Outcome(done, state, journal.tokens_seen)
    finally:
        watchdog.close()
        profile.close(done - 1)
        progress.close()
        trackers.close()


def _peak_rows(job: Job) -> float | None:
    """Rows per second at the peak of the mesh's devices; None where the peak of their kind is not known."""
    peak = peak_flops(job.mesh.devices.flat[0].device_kind)
    return None if peak is None or job.row_flops is None else peak * job.mesh.size / job.row_flops


def _compile(train_step, abstract: dict, placement: dict, job: Job, whole: list):
    """Compile once, ahead of the loop, and say what it takes."""
    started = time.monotonic()
    step_fn = compile_step(train_step, abstract, placement, job.batch, job.mesh)
    seconds = time.monotonic() - started
    memory = step_fn.memory_analysis()
    device_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    share = donated_share(step_fn, abstract, placement)
    if share < 0.95:
        raise RuntimeError(f"only {share:.0%} of the state is updated in place; memory would double")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract["params"]))
    sizes = ", ".join(f"{axis} {size}" for axis, size in job.mesh.shape.items() if size > 1) or "one device"
    batch, length = job.batch.tokens.shape
    print(
        f"{parameters:,} parameters on {sizes}; {batch} rows of {length} tokens a step, "
        f"{batch * length * job.config.training.steps:,} in all"
    )
    print(f"train step compiled in {seconds:.1f} s; {device_bytes / 2**20:,.0f} MiB a device")
    if job.mesh.shape["fsdp"] * job.mesh.shape["tensor"] > 1:
        for path, size in whole[:5]:
            print(f"whole on every device: {path} ({size:,} bytes)")
    return step_fn
