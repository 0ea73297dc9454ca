"""Train, evaluate, sample, load a run: the parts wired together. The verbs of the command line call these functions.

A run folder holds config.yaml (resolved), tokenizer.model, metrics.jsonl, rejects.jsonl (when a step was rejected),
checkpoints/, samples/, summary.json and last_exit.json.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from diffjax.compile_cache import compile_cache
from diffjax.config import Config, DistributedConfig, MeshConfig, dump_yaml, load_config, to_dict
from diffjax.config_loading import flatten
from diffjax.config_rules import validate
from diffjax.data.batch import abstract_batch
from diffjax.data.corpus import Corpus
from diffjax.data.loader import TrainLoader, held_out_batches, held_out_indices
from diffjax.data.prepare import prepare
from diffjax.data.tokenizer import Tokenizer
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.errors import GuardStop, Preempted, UserError, exit_code
from diffjax.evaluation.likelihood import evaluate_likelihood
from diffjax.interruption import preempted_by_sigterm
from diffjax.kernels import dispatch
from diffjax.models.denoiser import Denoiser
from diffjax.models.flops import flops_per_token
from diffjax.parallel import distributed
from diffjax.parallel.mesh import make_mesh, place_whole, row_sharding, to_host
from diffjax.sampling.generate import Generation, generate, sampler
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.loop import Job, fit
from diffjax.training.start import check_resume, check_weights, package_versions, stored_meta, weights_entry
from diffjax.training.summary import NELBO, UNIGRAM, summarise
from diffjax.training.tracking import duration, is_first_process

LAST_EXIT = "last_exit.json"


@dataclass(frozen=True)
class TrainResult:
    """How training ended: the step reached, the run folder, and the numbers of summary.json."""

    step: int
    dir: str
    summary: dict
    exit_code: int = 0


@dataclass(frozen=True)
class Run:
    """A trained run, ready to evaluate and sample. `params` are the averaged weights where the run kept them."""

    dir: Path
    config: Config
    tokenizer: Tokenizer
    denoiser: Denoiser
    params: dict
    step: int
    meta: dict


def train(config: Config, *, resume_command: str | None = None) -> TrainResult:
    """Train to `training.steps` in `run.dir`, going on from the checkpoint there if it holds one.

    resume_command is the command line that made `config`, shown where the same command goes on.
    Raises UserError, GuardStop (the guard gave up, state saved) and Preempted (asked to stop, state saved).
    """
    validate(config)
    dispatch.forget()
    sampler(config.sampling, config.model.block_size)  # a bad key is better told now than after the last step
    distributed.start(config.distributed)  # before any question about devices
    alike = dataclasses.replace(config, distributed=DistributedConfig())
    distributed.agree({**flatten(to_dict(alike)), **package_versions()})
    end = {"step": None}
    with contextlib.ExitStack() as held:
        identity = distributed.from_first(lambda: _open_folder(config, held, end))
        held.enter_context(_settings(config))
        result = _train(config, identity, resume_command)
        end["step"] = result.step
        distributed.gather("done")  # the first process may still have been writing
        return result


def _train(config: Config, identity: str | None, resume_command: str | None) -> TrainResult:
    run_dir = Path(config.run.dir)
    meta = stored_meta(config, {}, lambda text: None)
    if meta is not None and meta["step"] >= config.training.steps:
        print(f"already at step {meta['step']} of {config.training.steps}; a larger training.steps continues")
        return TrainResult(meta["step"], str(run_dir), _read_summary(run_dir))
    identity = identity or (meta and meta["run_id"]) or distributed.from_first(lambda: uuid.uuid4().hex[:8])
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, id=identity))
    began = time.monotonic()
    with _stoppable("stopped before the first step; nothing is half-written, the same command starts again"):
        corpus = _shared_corpus(config)
    held_out_indices(corpus, config.evaluation.rows)  # raises where nothing is held out
    if meta is not None:  # before anything in the folder is written
        check_resume(meta, config, _identities(corpus), config.run.dir, lambda text: None)
    job = _job(config, corpus, make_mesh(config.mesh))
    write_summary = partial(_write_summary, job, began, resume_command)
    with TrainLoader(corpus, config) as loader:
        try:
            outcome = fit(dataclasses.replace(job, read_rows=loader.rows))
        except GuardStop as stop:
            write_summary("guard stop", stop)
            raise
        except Preempted as stop:
            write_summary("preempted", stop)
            again = resume_command or "the same call"
            raise Preempted(f"{stop}. To go on: {again}", stop.step, stop.tokens_seen) from None
    summary = write_summary("finished", outcome)
    weights = outcome.state.get("ema", outcome.state["params"])
    with jax.set_mesh(job.mesh), _stoppable("stopped after the last step; the run is whole but for its samples"):
        text = _write_samples(config, job.denoiser, corpus, weights, outcome.step)
    _print_end(config, summary, text, resume_command)
    return TrainResult(outcome.step, str(run_dir), summary)


def _open_folder(config: Config, held: contextlib.ExitStack, end: dict) -> str | None:
    """Make and lock the run folder, and have the `end` of this run noted in it. By process 0 alone.

    Returns the run's id, the config's or the folder's; None where neither has one. Trackers never choose it.
    """
    run_dir = Path(config.run.dir)
    held.enter_context(_folder(run_dir))
    held.enter_context(_locked(run_dir))
    held.enter_context(_noting_the_end(run_dir, end))
    identity, stored = config.run.id, run_dir / "config.yaml"
    if identity is None and stored.is_file():
        identity = load_config(stored).run.id
    return identity


def _shared_corpus(config: Config) -> Corpus:
    """The corpus, prepared by the first process where it is missing; the others wait for it and open it."""
    mine: list[Corpus] = []

    def make() -> str:
        mine.append(prepare(config))
        return str(mine[0].directory.absolute())

    folder = Path(distributed.from_first(make))

    def look() -> Corpus:
        if not folder.is_dir():
            host = os.uname().nodename
            raise UserError(f"{folder}: not there on {host}; data.corpus must name a folder that all hosts share")
        corpus = Corpus.open(folder)
        corpus.require(config)
        return corpus

    corpus = mine[0] if mine else None
    corpus = distributed.together(lambda: corpus or look())
    distributed.agree(_identities(corpus))
    return corpus


def _job(config: Config, corpus: Corpus, mesh: Mesh) -> Job:
    tokenizer, data, run_dir = corpus.tokenizer, config.data, Path(config.run.dir)
    denoiser = Denoiser(config.model, vocab_size=tokenizer.vocab_size, kernels=config.kernels)
    rows = config.training.batch_size

    def draw_noise(step, batch):
        return draw(config.objective, config.run.seed, step, batch, rows)

    def evaluate_now(params, should_stop):
        try:
            return _likelihood(config, denoiser, params, corpus, mesh, should_stop)
        except FloatingPointError as error:
            print(f"WARNING: {error}", file=sys.stderr)
            return {NELBO: float("nan")}

    def begin():
        _write(run_dir / "config.yaml", dump_yaml(config))
        _write(run_dir / "tokenizer.model", tokenizer.model_bytes)

    return Job(
        config=config,
        mesh=mesh,
        denoiser=denoiser,
        objective=block_diffusion(
            denoiser, config.objective, tokenizer.mask_id, data.tail, config.kernels.cross_entropy_chunk
        ),
        draw_noise=draw_noise,
        read_rows=None,
        batch=abstract_batch(rows, data.sequence_length, config.model.block_size),
        identities=_identities(corpus),
        evaluate=evaluate_now,
        notes={"corpus_folder": str(corpus.directory.absolute())},
        row_flops=data.sequence_length * flops_per_token(config, tokenizer.vocab_size),
        begin=begin,
    )


def _identities(corpus: Corpus) -> dict[str, str]:
    """What a resumed run must find again."""
    return {"corpus": corpus.identity, "tokenizer": corpus.tokenizer.identity}


def load_run(folder, overrides=()) -> Run:
    """The newest good checkpoint of a run folder on one device, with its config (and `section.key=value` overrides).

    Raises UserError when the folder is no run, its checkpoint cannot be read or the config does not fit it.
    """
    run_dir = Path(folder)
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: is not a run folder: it holds no config.yaml (diffjax train makes one)")
    config = load_config(run_dir / "config.yaml", overrides)
    tokenizer = Tokenizer.load(run_dir / "tokenizer.model")
    denoiser = Denoiser(config.model, vocab_size=tokenizer.vocab_size, kernels=config.kernels)
    checkpoints = Checkpoints(run_dir / "checkpoints", report=lambda text: print(text, file=sys.stderr))
    with _settings(config):
        device = SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), denoiser.abstract_params()
        )
        try:
            meta = checkpoints.newest_meta()
            if meta is None:
                raise UserError(f"{run_dir}: holds no complete checkpoint yet; train it first")
            check_weights(meta, config, tokenizer.identity, str(run_dir))
            entry = weights_entry(meta)
            restored = checkpoints.restore({entry: params})
        finally:
            checkpoints.close()
    return Run(run_dir, config, tokenizer, denoiser, restored.state[entry], restored.step, restored.meta)


def evaluate(run: Run, **keys) -> dict:
    """Held-out likelihood of a run, printed and returned; `keys` replace keys of its `evaluation` section."""
    config = dataclasses.replace(run.config, evaluation=dataclasses.replace(run.config.evaluation, **keys))
    validate(config)
    corpus = _corpus_of(run)
    mesh = _one_device()
    with _settings(config), jax.set_mesh(mesh):
        record = _likelihood(config, run.denoiser, run.params, corpus, mesh)
    error = "" if record["mc_se"] is None else f" +- {record['mc_se']:.4f}"
    print(f"{run.dir} at step {run.step}: {record['tokens_scored']:,} held-out tokens, estimator {record['estimator']}")
    print(f"NELBO {record['bound']} {record[NELBO]:.4f}{error} nats/token (unigram {record[UNIGRAM]:.4f})")
    if record["eval/bpb_bound"] is None:
        print(f"bits/byte not given: {record['bpb_reason']}")
    else:
        print(f"      {record['bound']} {record['eval/bpb_bound']:.4f} bits/byte")
    return {"run": str(run.dir), "step": run.step, **record}


def sample(
    run: Run, prompts: list[str], *, on_block: Callable[[int, str], None] | None = None, **keys
) -> list[Generation]:
    """Continue the prompts; `keys` replace keys of the run's `sampling` section. See `diffjax.sampling.generate`."""
    sampling = dataclasses.replace(run.config.sampling, **keys)
    with _settings(run.config), jax.set_mesh(_one_device()):
        return generate(run.denoiser, run.params, run.tokenizer, prompts, sampling, on_block=on_block)


def _one_device() -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


def _likelihood(config, denoiser, params, corpus: Corpus, mesh: Mesh, should_stop=lambda: False) -> dict | None:
    rows = row_sharding(mesh)
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    size = -(-config.evaluation.batch_size // parts) * parts  # the next size that splits over the devices
    return evaluate_likelihood(
        denoiser,
        params,
        held_out_batches(corpus, size, config.evaluation.rows),
        tokenizer=corpus.tokenizer,
        evaluation=config.evaluation,
        mask_id=corpus.tokenizer.mask_id,
        tail=config.data.tail,
        packing=config.data.packing,
        chunk=config.kernels.cross_entropy_chunk,
        unigram=corpus.unigram(),
        should_stop=should_stop,
        place=lambda batch: place_whole(batch, rows),
        fetch=to_host,
    )


def _corpus_of(run: Run) -> Corpus:
    """The corpus the run was trained on: where it lay then, or prepared again from the config.

    Not into a folder that the user named: another corpus there would stand in the way of the right one.
    """
    folder = Path(run.meta["corpus_folder"])
    if run.config.data.corpus and not folder.is_dir():
        raise UserError(f"{folder}: the corpus that {run.dir} was trained on is not there; bring it back")
    corpus = Corpus.open(folder) if folder.is_dir() else prepare(run.config)
    if corpus.identity != run.meta["corpus"]:
        raise UserError(f"the corpus {corpus.directory} is not the one that {run.dir} was trained on")
    return corpus


def _write_samples(config: Config, denoiser, corpus: Corpus, params, step: int) -> str:
    """Write an unprompted and two prompted samples to samples/, the prompts from held-out text; return the last."""
    batch = next(held_out_batches(corpus, 2, 2))
    opening = [row[valid][: denoiser.block_size + 1] for row, valid in zip(batch.tokens, batch.valid, strict=True)]
    prompts = ["", *(corpus.tokenizer.decode([int(token) for token in row]) for row in opening if len(row))]
    results = generate(denoiser, params, corpus.tokenizer, prompts, config.sampling, fetch=to_host)
    folder = Path(config.run.dir) / "samples"
    texts = [f"{prompt}|{result.text}" for prompt, result in zip(prompts, results, strict=True)]
    _write(folder / f"step_{step:06d}.txt", "\n\n--------\n\n".join(texts) + "\n")
    return texts[-1]


def _write_summary(job: Job, began: float, command: str | None, ended: str, end) -> dict:
    """Write and return the summary of a run that ended at `end`: its step and tokens_seen."""
    summary = summarise(
        job.config,
        job.mesh,
        ended=ended,
        step=end.step,
        tokens_seen=end.tokens_seen,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(job.denoiser.abstract_params())),
        seconds=time.monotonic() - began,
        command=command,
    )
    path = Path(job.config.run.dir) / "summary.json"
    try:
        _write(path, json.dumps(summary, indent=2) + "\n")
    except OSError as error:  # the state is saved; how the run ended must not be hidden by this
        print(f"WARNING: {path} could not be written: {error.strerror}", file=sys.stderr)
    return summary


def _read_summary(run_dir: Path) -> dict:
    """The numbers the run ended with; {} where the file is missing or damaged."""
    try:
        return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _print_end(config: Config, summary: dict, text: str, command: str | None) -> None:
    numbers = [summary[f"{name}_nats_per_token"] for name in ("unigram", "first_nelbo", "last_nelbo")]
    unigram, first, last = ("-" if n is None else f"{float(n):.4f}" for n in numbers)
    memory = summary["peak_memory_bytes"] / 2**30
    print(f"step {summary['step']} reached in {duration(summary['seconds'])}, peak memory {memory:.1f} GiB")
    print(f"held-out nats/token: unigram {unigram}, NELBO at the start <= {first}, at the end <= {last}")
    print(f"a sample (prompt|continuation; more in {config.run.dir}/samples):\n{text}\n")
    print(f"sample:    diffjax sample {shlex.quote(config.run.dir)} --prompt 'def main('")
    print(f"evaluate:  diffjax evaluate {shlex.quote(config.run.dir)}")
    if command is not None:
        words = [word for word in shlex.split(command) if not word.startswith("training.steps=")]
        print(f"go on:     {shlex.join([*words, f'training.steps={2 * config.training.steps}'])}")


@contextlib.contextmanager
def _folder(run_dir: Path) -> Iterator[None]:
    """Make the run folder; leave none behind where nothing was begun in it.

    With several processes it stays: their launcher reads how the start ended from last_exit.json.
    """
    try:
        made = not run_dir.exists()
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir={run_dir} cannot be a run folder: {error.strerror}; choose another") from None
    try:
        yield
    finally:
        untouched = {path.name for path in run_dir.iterdir()} <= {".lock", LAST_EXIT, "checkpoints", "compile_cache"}
        alone = distributed.process_count() == 1
        if made and alone and untouched and not any(run_dir.glob("checkpoints/*")):
            shutil.rmtree(run_dir)


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder, so that no second run trains in it: the death of this process frees it."""
    try:
        lock = open(run_dir / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"run.dir={run_dir} cannot be written: {error.strerror}; choose another") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"{run_dir} is in use by another training process ({file.read().strip()}); choose another run.dir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


@contextlib.contextmanager
def _noting_the_end(run_dir: Path, end: dict) -> Iterator[None]:
    """Write last_exit.json at the end: which start of this run it was, its exit code, and the step that is saved.

    A launcher reads it, since of several processes' exit codes it sees one. Killed, a run leaves the one of before.
    """
    path = run_dir / LAST_EXIT
    try:
        attempt = json.loads(path.read_text(encoding="utf-8"))["attempt"] + 1
    except (OSError, ValueError, KeyError, TypeError):
        attempt = 1
    code = 0
    try:
        yield
    except BaseException as error:
        code, end["step"] = exit_code(error), getattr(error, "step", None)
        raise
    finally:
        _replace(path, json.dumps({"attempt": attempt, "code": code, "step": end["step"]}) + "\n")


@contextlib.contextmanager
def _settings(config: Config) -> Iterator[None]:
    """What JAX is set to while it works for this config: the compile cache, and 64-bit numbers for a float64 model."""
    wide = jax.enable_x64(True) if config.model.dtype == "float64" else contextlib.nullcontext()
    with wide, compile_cache(config.training.compile_cache, Path(config.run.dir)):
        yield


def _stoppable(text: str) -> contextlib.AbstractContextManager:
    """SIGTERM inside ends the run with this text; several processes have JAX's preemption service instead."""
    return preempted_by_sigterm(text) if distributed.process_count() == 1 else contextlib.nullcontext()


def _write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; the first process does."""
    if is_first_process():
        path.parent.mkdir(exist_ok=True)
        _replace(path, content)


def _replace(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)
