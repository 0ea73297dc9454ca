"""The command line: exit codes, where output goes, flags as config keys. The functions it calls are stood in for."""

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import diffjax
from diffjax import cli
from diffjax.config import Config, dump_yaml, load_config
from diffjax.errors import GuardStop, Preempted, UserError

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass
class Result:
    step: int = 3
    loss: float = float("nan")
    exit_code: int = 0


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A folder with a config and a run; `diffjax.run` is replaced by a recorder, whose functions tests may replace."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("training: {steps: 200}\n")
    Path("run").mkdir()
    Path("run/config.yaml").write_text(dump_yaml(Config()))
    seen = types.SimpleNamespace()

    def train(config, resume_command=None):
        seen.config, seen.command = config, resume_command
        print("progress")
        return Result()

    def load_run(folder, overrides=()):
        return types.SimpleNamespace(config=load_config(Path(folder) / "config.yaml", overrides))

    def evaluate(run):
        seen.config = run.config
        return {"eval/nelbo_nats_per_token": 1.5, "bound": "<="}

    module = types.ModuleType("diffjax.run")
    module.train, module.load_run, module.evaluate = train, load_run, evaluate
    monkeypatch.setitem(sys.modules, "diffjax.run", module)
    seen.module = module
    return seen


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def test_train_passes_the_config_and_the_command_that_continues(calls, capsys):
    assert cli.main(["train", "a.yaml", "training.steps=7", "run.dir=my run", "optimizer.warmup_steps=1"]) == 0
    assert (calls.config.training.steps, calls.config.run.dir) == (7, "my run")
    assert calls.command == "diffjax train a.yaml training.steps=7 'run.dir=my run' optimizer.warmup_steps=1"
    assert capsys.readouterr().out == "progress\n"


def test_json_is_one_object_on_standard_output_and_all_else_on_standard_error(calls, capsys):
    assert cli.main(["train", "--json", "a.yaml"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"step": 3, "loss": None, "exit_code": 0}
    assert captured.err == "progress\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("fix it"), 2), (GuardStop("stopped"), 4), (Preempted("saved"), 75), (KeyboardInterrupt(), 130)],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes_without_a_traceback(calls, capsys, error, code, as_json):
    calls.module.train = raising(error)
    assert cli.main(["train", "a.yaml", *["--json"] * as_json]) == code
    captured = capsys.readouterr()
    said = str(error) or "interrupted"
    assert captured.err == said + "\n"
    assert captured.out == (json.dumps({"error": said, "exit_code": code}) + "\n" if as_json else "")


def test_a_result_may_carry_its_exit_code(calls):
    calls.module.train = lambda *args, **kwargs: Result(exit_code=75)
    assert cli.main(["train", "a.yaml"]) == 75


def test_unexpected_errors_show_their_traceback(calls, capsys):
    calls.module.train = raising(ZeroDivisionError("oh"))
    assert cli.main(["train", "a.yaml"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert cli.main(["train", "a.yaml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1


def test_user_errors_show_the_message_alone(calls, capsys):
    assert cli.main(["train", "b.yaml"]) == 2
    assert capsys.readouterr().err == "b.yaml: no such file\n"
    calls.module.load_run = raising(UserError("nowhere: is not a run folder"))
    assert cli.main(["evaluate", "nowhere"]) == 2
    assert capsys.readouterr().err == "nowhere: is not a run folder\n"


def test_flags_are_config_keys(calls, capsys):
    flags = ["--samples", "3", "evaluation.batch_size=2", "--replicates", "4", "--rows", "5", "--suite", "likelihood"]
    assert cli.main(["evaluate", "run", *flags]) == 0
    evaluation = calls.config.evaluation
    assert (evaluation.samples, evaluation.replicates, evaluation.rows, evaluation.batch_size) == (3, 4, 5, 2)
    capsys.readouterr()
    assert cli.main(["evaluate", "run", "--samples", "x"]) == 2
    assert capsys.readouterr().err == "command line: evaluation.samples: expected an integer, got the text 'x'\n"
    assert cli.main(["evaluate", "run", "--samples", "3", "evaluation.samples=4"]) == 2
    assert "'evaluation.samples' is given twice" in capsys.readouterr().err
    assert cli.main(["evaluate", "run", "model.layers=4"]) == 2
    assert "'model.layers=4' would not change a trained run" in capsys.readouterr().err


def test_prepare_reports_the_manifest(calls, capsys, monkeypatch):
    def prepare(config):
        calls.config = config
        print("reading")
        return types.SimpleNamespace(manifest={"complete": True, "tokens": np.int64(7)})

    monkeypatch.setattr("diffjax.data.prepare.prepare", prepare)
    assert cli.main(["prepare", "a.yaml", "data.held_out=0.5"]) == 0
    assert capsys.readouterr().out == "reading\n" and calls.config.data.held_out == 0.5
    assert cli.main(["prepare", "--json", "a.yaml"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ({"complete": True, "tokens": 7}, "reading\n")


def test_sample_streams_blocks_and_ends_with_the_counts(calls, capsys):
    from diffjax.sampling.generate import Generation, Statistics

    def sample(run, prompts, on_block=None):
        calls.prompts, calls.config = prompts, run.config
        for row in (0, len(prompts) - 1, 0):
            on_block(row, "ab\n")
        statistics = Statistics(6, 2, 1, 0, False, 0.25)
        return [Generation("ab\nab\n", np.array([5, 6]), 9, "length", statistics) for _ in prompts]

    calls.module.sample = sample
    assert cli.main(["sample", "run", "--prompt", "say ", "--blocks", "2", "--top-p", "0.5", "sampling.seed=4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "say ab\nab\nab\n\n"
    assert captured.err == "6 tokens, 2 denoise calls, 3.00 tokens per call (TPF), 0.2 s\n"
    assert calls.prompts == ["say "]
    assert (calls.config.sampling.blocks, calls.config.sampling.top_p, calls.config.sampling.seed) == (2, 0.5, 4)

    assert cli.main(["sample", "run", "--prompt", "x", "--prompt", "y"]) == 0
    assert capsys.readouterr().out == "[0] xab\n\n[1] yab\n\n[0] ab\n\n"

    assert cli.main(["sample", "run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert calls.prompts == [""]
    assert said["samples"][0]["text"] == "ab\nab\n" and said["samples"][0]["tokens"] == [5, 6]
    assert said["tpf"] == 3.0 and said["sampling"]["rule"] == "threshold"


@pytest.mark.parametrize("verb", ["sample", "evaluate"])
def test_every_flag_names_an_existing_key(verb):
    section = getattr(Config(), cli.VERBS[verb].section)
    assert all(hasattr(section, flag) for flag in cli.VERBS[verb].flags)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "a.yaml", "--nope"],
        ["sample", "run", "--block", "3"],
        ["evaluate", "run", "--suite", "x"],
    ],
)
def test_bad_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: diffjax" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([verb, "--help"] for verb in cli.VERBS)])
def test_help(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert diffjax.__version__ in out if argv == ["--version"] else all(verb in out for verb in argv[:-1])


def run_python(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, **kwargs)


def test_config_errors_and_help_do_not_start_jax():
    code = (
        "import sys, diffjax.cli as c; print(c.main(['train', 'configs/quickstart.yaml', 'x=1']), 'jax' in sys.modules)"
    )
    result = run_python(code)
    assert result.stdout == "2 False\n"
    assert result.stderr.startswith("command line: unknown key 'x'; ")


def test_a_reader_that_goes_away_ends_the_verb_quietly():
    code = """
import sys, types
from diffjax import cli
run = types.ModuleType("diffjax.run")
run.train = lambda *args, **kwargs: [print("x" * 1000) for _ in range(1000)]
sys.modules["diffjax.run"] = run
sys.exit(cli.main(["train", "configs/quickstart.yaml"]))
"""
    shell = ["bash", "-c", '"$1" -c "$2" | head -c 10; exit ${PIPESTATUS[0]}', "bash", sys.executable, code]
    result = subprocess.run(shell, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (141, "x" * 10, "")


def test_python_dash_m_is_the_same_command():
    argv = [sys.executable, "-m", "diffjax", "train", "none.yaml"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "none.yaml: no such file\n")


def test_control_characters_cannot_command_a_terminal(monkeypatch):
    assert cli._harmless("a\x1b[2J\n\té\r") == "a\x1b[2J\n\té\r"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli._harmless("a\x1b[2J\n\té\r") == "a\\x1b[2J\n\té\\r"


def test_public_names_exist_and_are_found_lazily():
    code = "import sys, diffjax; print('jax' in sys.modules, 'yaml' in sys.modules, len(dir(diffjax)))"
    assert run_python(code).stdout == f"False False {len(diffjax.__all__)}\n"
    for name in diffjax.__all__:
        assert getattr(diffjax, name) is not None
    with pytest.raises(AttributeError, match="load_config"):
        diffjax.load_confg  # noqa: B018
