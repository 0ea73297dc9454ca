"""The command line: `diffjax VERB`. Parses, calls the function of the same name, reports; no logic of its own.

Exit codes: 0 done, 1 unexpected error (traceback), 2 the user's input is wrong, 3 a plan that does not fit, 4 the guard
stopped the run, 75 asked to stop, state saved, start me again, 130 interrupted, 141 the reader of our output went away.
JAX is imported by the verbs' functions, not here, so that help and config errors appear at once.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from diffjax import __version__
from diffjax.config import load_config, to_dict
from diffjax.errors import EXIT_CODES, StuckSave, UserError, exit_code
from diffjax.huge_pages import restart_with_huge_pages
from diffjax.interruption import preempted_by_sigterm

BROKEN_PIPE = 141


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code. Reads sys.argv when `argv` is None."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    arguments.own_process = argv is None
    arguments.stuck = False
    code = _report(arguments)
    joined = _joined()
    code = joined.leave(code, together=code in (0, 4, 75)) if joined else code
    if arguments.stuck and arguments.own_process:
        os._exit(code)
    return code


def _report(arguments: argparse.Namespace) -> int:
    """Call the verb and tell how it ended: the exit code."""
    output = sys.stdout
    try:
        try:
            redirect = contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext()
            with _log_on_stderr(), redirect:
                result = VERBS[arguments.verb].call(arguments)
            code = getattr(result, "exit_code", 0)
        except tuple(EXIT_CODES) as error:
            code = exit_code(error)
            result = {"error": str(error) or "interrupted", "exit_code": code}
            print(result["error"], file=sys.stderr)
            arguments.stuck = isinstance(error, StuckSave)
        if arguments.json and _is_first():
            print(json.dumps(_plain(result), allow_nan=False), file=output)
        output.flush()
        return code
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # or the interpreter would complain again in its last flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        traceback.print_exc()
        if arguments.json and _is_first():
            print(json.dumps({"error": repr(error), "exit_code": 1}), file=output)
        return 1


def _joined():
    """The module through which this process joined others; None where no verb came so far as to import it."""
    return sys.modules.get("diffjax.parallel.distributed")


def _is_first() -> bool:
    return _joined() is None or _joined().rank() == 0


class _OnStderr(logging.Handler):
    """Writes to what standard error is at that moment: it changes when a process learns its rank."""

    def emit(self, record):
        print(self.format(record), file=sys.stderr)


@contextlib.contextmanager
def _log_on_stderr():
    """The package's log lines (which kernel runs, and why) appear on standard error."""
    log, handler = logging.getLogger("diffjax"), _OnStderr()
    log.setLevel(logging.INFO)
    log.propagate = False  # a library may have put a handler on the root
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


# The verbs


def _train(arguments):
    config = load_config(arguments.config, arguments.overrides)
    _before_jax(arguments)
    from diffjax.run import train

    return train(config, resume_command=shlex.join(["diffjax", "train", arguments.config, *arguments.overrides]))


def _prepare(arguments):
    config = load_config(arguments.config, arguments.overrides)
    from diffjax.data.prepare import prepare

    with preempted_by_sigterm("stopped; the same command goes on"):
        return prepare(config).manifest


def _plan(arguments):
    config = load_config(arguments.config, arguments.overrides)
    from diffjax.parallel.chips import ENVIRONMENT, topology

    if (name := arguments.topology or config.mesh.topology) is not None:
        topology(name)  # a wrong name is told at once
    os.environ.update(ENVIRONMENT)
    from diffjax.parallel.plan import plan
    from diffjax.parallel.plan_text import text

    result = plan(
        config,
        name,
        compiled=arguments.compile or arguments.every_remat,
        every_remat=arguments.every_remat,
        lengths=arguments.lengths,
    )
    print(text(result))
    return result


def _sample(arguments):
    run = _load_run(arguments)
    from diffjax.run import sample
    from diffjax.sampling.generate import summary

    prompts = arguments.prompt or [""]
    results = sample(run, prompts, on_block=_Terminal(prompts))
    total = summary(results)
    print()
    print(
        f"{total['tokens']} tokens, {total['denoise_calls']} denoise calls, "
        f"{total['tpf']:.2f} tokens per call (TPF), {total['seconds']:.1f} s",
        file=sys.stderr,
    )
    rows = [{"prompt": prompt, **_plain(result)} for prompt, result in zip(prompts, results, strict=True)]
    return {"samples": rows, "sampling": to_dict(run.config)["sampling"], **total}


def _evaluate(arguments):
    run = _load_run(arguments)
    from diffjax.run import evaluate

    return evaluate(run)


def _load_run(arguments):
    """The trained run of a folder. Flags become overrides; all are read before JAX starts, so errors are instant."""
    verb = VERBS[arguments.verb]
    flags = {f"{verb.section}.{flag}": getattr(arguments, flag) for flag in verb.flags}
    overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    for override in overrides:
        if not override.startswith(("sampling.", "evaluation.", "kernels.")):
            raise UserError(
                f"command line: '{override}' would not change a trained run; "
                f"{arguments.verb} takes keys of sampling, evaluation and kernels"
            )
    stored = Path(arguments.run) / "config.yaml"
    if stored.is_file():
        load_config(stored, overrides)
    _before_jax(arguments)
    from diffjax.run import load_run

    return load_run(arguments.run, overrides)


def _before_jax(arguments) -> None:
    """The last moment to start again: the command is right, and nothing has been printed or opened."""
    if arguments.own_process:
        restart_with_huge_pages()


class _Terminal:
    """Writes each prompt and then its blocks as they are finished; with several prompts, says whose block it is."""

    def __init__(self, prompts: list[str]):
        self.prompts = dict(enumerate(prompts))
        self.labelled = len(prompts) > 1
        self.row = None

    def __call__(self, row: int, text: str) -> None:
        if self.labelled and row != self.row:
            print(f"{'' if self.row is None else chr(10)}[{row}] ", end="")
        self.row = row
        print(_harmless(self.prompts.pop(row, "") + text), end="", flush=True)


def _harmless(text: str) -> str:
    """Control characters made visible where they could command a terminal."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value):
    """What JSON can hold: dataclasses and arrays become dicts and lists, numbers that are not finite become null."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


# Parsing


@dataclasses.dataclass(frozen=True)
class _Verb:
    """`section` is None for verbs that take a CONFIG; the others take a RUN and have keys of that section as flags."""

    call: Callable
    help: str
    example: str
    section: str | None = None
    flags: dict[str, str] = dataclasses.field(default_factory=dict)


VERBS = {
    "train": _Verb(
        _train,
        "train a denoiser; goes on where the run of that folder stopped",
        "diffjax train configs/quickstart.yaml training.steps=300",
    ),
    "prepare": _Verb(
        _prepare,
        "make the tokenizer and the corpus of a config, apart from training",
        "diffjax prepare configs/quickstart.yaml",
    ),
    "plan": _Verb(
        _plan,
        "say what a config needs on devices that are not here: memory, FLOPs, context sizes",
        "diffjax plan configs/seed_3b_hybrid.yaml --topology v5e:16x16 --compile",
    ),
    "sample": _Verb(
        _sample,
        "continue prompts with a trained run; blocks appear as they are finished",
        'diffjax sample runs/quickstart --prompt "def main(" --blocks 8',
        section="sampling",
        flags={
            "blocks": "how many blocks to generate",
            "rule": "which positions a step commits",
            "threshold": "probability from which a token is committed",
            "steps": "denoising steps per block",
            "score": "what positions are ranked by",
            "temperature": "0 takes the most probable token",
            "top_p": "probability mass of the tokens that may be drawn",
            "seed": "another seed, another sample",
        },
    ),
    "evaluate": _Verb(
        _evaluate,
        "score a trained run: the held-out NELBO in nats per token and bits per byte",
        "diffjax evaluate runs/quickstart --samples 4",
        section="evaluation",
        flags={
            "samples": "masks drawn for each row",
            "replicates": "repetitions, from which the standard error comes",
            "rows": "only so many rows of the held-out text",
        },
    ),
}


def _parse(argv: list[str]) -> argparse.Namespace:
    """Exits with 2 on bad usage and with 0 after --help or --version, as argparse does."""
    if argv and argv[0] in VERBS:
        arguments = _verb_parser(argv[0]).parse_intermixed_args(argv[1:])
        return argparse.Namespace(verb=argv[0], **vars(arguments))
    lines = [f"  {name:<10}{verb.help}" for name, verb in VERBS.items()]
    parser = argparse.ArgumentParser(
        prog="diffjax",
        usage="diffjax VERB ...",
        description="Block-diffusion language models in JAX.",
        epilog="\n".join(["verbs:", *lines, "", "`diffjax VERB --help` says more."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"diffjax {__version__}")
    parser.add_argument("verb", metavar="VERB", choices=VERBS, help=argparse.SUPPRESS)
    return parser.parse_args(argv[:1])


def _lengths(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of token counts such as 4096,262144")
    return tuple(map(int, numbers))


def _verb_parser(name: str) -> argparse.ArgumentParser:
    verb = VERBS[name]
    parser = argparse.ArgumentParser(
        prog=f"diffjax {name}",
        description=verb.help[0].upper() + verb.help[1:] + ".",
        epilog=f"example: {verb.example}",
        allow_abbrev=False,
    )
    if verb.section is None:
        parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
    else:
        parser.add_argument("run", metavar="RUN", help="the folder of a trained run, such as runs/quickstart")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="change config keys")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    if name == "sample":
        parser.add_argument("--prompt", action="append", help="text to continue; may be repeated (default: empty)")
    if name == "plan":
        parser.add_argument(
            "--topology", metavar="NAME", help="such as v5e:16x16, h100:8, cpu:8 (the key mesh.topology)"
        )
        parser.add_argument(
            "--compile", action="store_true", help="compile the train step for it: true memory, traffic"
        )
        parser.add_argument(
            "--every-remat", action="store_true", help="compile it under every rematerialisation policy"
        )
        parser.add_argument(
            "--lengths", type=_lengths, default=(), metavar="N,N", help="tokens at which to report a context's size"
        )
    if name == "evaluate":
        parser.add_argument("--suite", choices=["likelihood"], default="likelihood", help="what to measure")
    for flag, text in verb.flags.items():
        option = "--" + flag.replace("_", "-")
        parser.add_argument(option, dest=flag, metavar="X", help=f"{text} (the key {verb.section}.{flag})")
    return parser
