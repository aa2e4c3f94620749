"""The command line and TOML files: what wins, what is refused, what comes back."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from msgspec import Meta

from megathunder import config as config_module
from megathunder.config import Config
from megathunder.config.help import SHORT
from megathunder.config.load import load_config
from megathunder.config.ranges import annotations, check_ranges
from megathunder.config.synonyms import _NAMES, SYNONYMS
from megathunder.config.toml import from_table, read_config, settings, to_toml
from megathunder.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(p for p in FOLDER.glob("**/*.toml") if FOLDER / "tasks" not in p.parents)


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('objective = "opd"\n[run]\nupdates = 7\nseed = 3\n')
    config = load_config(["--config", str(file), "--run.seed", "5"])
    assert (config.objective, config.run.updates, config.run.seed, config.run.group_size) == ("opd", 7, 5, 8)


def test_underscores_hyphens_and_equals_signs_are_the_same() -> None:
    spellings = (
        ["--learner.tensor_parallel", "2"],
        ["--learner.tensor-parallel", "2"],
        ["--learner.tensor_parallel=2"],
    )
    assert [load_config(argv).learner.tensor_parallel for argv in spellings] == [2, 2, 2]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tasks.wrap", "false"], False),
        (["--tasks.wrap=False"], False),
        (["--tasks.no-wrap"], False),
        (["--tasks.wrap"], True),
        (["--tasks.wrap", "true"], True),
    ],
)
def test_a_switch_may_be_given_as_a_flag_or_a_value(argv: list[str], expected: bool) -> None:
    assert load_config(argv).tasks.wrap is expected


def test_a_free_table_takes_any_name_and_adds_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[rollout.sglang]\nmem_fraction_static = 0.5\ndisable_cuda_graph = true\n")
    config = load_config(["--config", str(file), "--rollout.sglang.max-prefill-tokens", "64"])
    assert config.rollout.sglang == {
        "mem_fraction_static": "0.5",
        "disable_cuda_graph": "true",
        "max_prefill_tokens": "64",
    }


def test_lists_are_written_with_spaces() -> None:
    config = load_config(["--rollout.cpu_cores", "0", "1", "--tasks.kinds", "read", "sum"])
    assert config.rollout.cpu_cores == (0, 1)
    assert config.tasks.kinds == ("read", "sum")


def test_relative_folders_are_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--learner.model", "m", "--opd.teacher", "./sub/t"])
    assert config.learner.model == str(tmp_path / "m")
    assert config.opd.teacher == str(tmp_path / "sub" / "t")
    assert config.run.folder == str(tmp_path / "runs")


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists beside the file is meant; what does not is looked for in the current folder, where runs go too."""
    project, here = tmp_path / "project", tmp_path / "here"
    for folder in (project / "data", project / "runs", here / "models" / "m"):
        folder.mkdir(parents=True)
    (project / "c.toml").write_text('tasks.path = "data"\nlearner.model = "models/m"\nrun.folder = "runs"\n')
    monkeypatch.chdir(here)
    config = load_config(["--config", str(project / "c.toml")])
    assert config.tasks.path == str(project / "data")
    assert config.learner.model == str(here / "models" / "m")
    assert config.run.folder == str(here / "runs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.updates = 0", "more than 0"),
        ("rollout.top_p = 1.5", "more than 0, at most 1"),
        ("learner.weight_decay = nan", "a finite number, 0 or more"),
        ("sandbox.lifetime_s = inf", "a finite number, more than 0"),
        ("salt.severe_cancellation = 1.0", "0 or more, below 1"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused_with_them(tmp_path: Path, text: str, expected: str) -> None:
    name, _, value = text.partition(" = ")
    (tmp_path / "c.toml").write_text(text)
    for words in (["--config", str(tmp_path / "c.toml")], [f"--{name}", value]):
        with pytest.raises(ConfigError) as refused:
            check_ranges(load_config(words))
        assert refused.value.expected == expected and f"{name} = " in refused.value.seen


def test_every_number_has_a_lower_bound() -> None:
    kinds = {name: kind for name, (kind, _) in annotations(Config).items() if dataclasses.is_dataclass(kind)}
    unbounded = [
        f"{section}.{name}"
        for section, kind in kinds.items()
        for name, (hint, extra) in annotations(kind).items()  # type: ignore[arg-type]
        if hint in (int, float)
        and not any(isinstance(part, Meta) and (part.gt is not None or part.ge is not None) for part in extra)
    ]
    assert not unbounded, f"write PositiveInt or the like (config/field_types.py): {unbounded}"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[learner]\ntensor_paralel = 2", "tensor_parallel"),
        ("[learner]\ntemperature = 2", "[rollout] temperature"),
        ("[rolout]\nport = 1", "rollout"),
        ("objektive = 'grpo'", "objective"),
        ("[learner]\ndtype = 'bf16'", "bfloat16"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_table(tomllib.loads(text), "c.toml")
    assert hint in refused.value.remedy
    assert "c.toml" in refused.value.seen


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ('[learner]\ntensor_parallel = "2"', "learner.tensor_parallel", "int"),
        ('[rollout]\nurls = "http://a"', "rollout.urls", "tuple"),
        ("[rollout]\nurls = [1]", "rollout.urls", "tuple"),
        ("[tasks]\nwrap = 1", "tasks.wrap", "bool"),
        ("learner = 3", "learner", "section"),
        ("[rollout]\nsglang = 3", "rollout.sglang", "dict"),
        ("[run]\nupdates = 1.5", "run.updates", "int"),
    ],
)
def test_a_wrong_type_is_refused_with_name_and_type(text: str, name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_table(tomllib.loads(text), "c.toml")
    assert f"{name} = " in refused.value.seen
    assert expected in refused.value.expected


def test_broken_or_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[run\n")
    for path, words in ((tmp_path / "bad.toml", "line 1"), (tmp_path / "none.toml", "no such file")):
        with pytest.raises(ConfigError, match=words):
            read_config(path)
    with pytest.raises(ConfigError, match="--config ends"):
        load_config(["--config"])


@pytest.mark.parametrize(
    "words",
    [
        ["--grpo.advantage", "batch_whitening"],
        ["--grpo.advantage=multi-step-clipping"],
        ["--grpo.relative-length-penalty", "0.1"],
        ["--config", "grpo.batch_whitening = true"],
        ["--config", "grpo.multi_step_clipping = true"],
    ],
)
def test_what_cannot_be_streamed_is_refused_by_its_name_with_the_reason(tmp_path: Path, words: list[str]) -> None:
    if words[0] == "--config":
        (tmp_path / "c.toml").write_text(words[1] + "\n")
        words = ["--config", str(tmp_path / "c.toml")]
    with pytest.raises(ConfigError) as refused:
        load_config(words)
    assert "own group" in refused.value.expected and "is refused because" in refused.value.remedy
    load_config(["--run.name", "batch_whitening"])  # a run may be called so


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--learner.tensor-paralel", "--learner.tensor_parallel"),
        ("--learner.lr", "--learner.learning_rate"),
        ("--learning-rate", "--learner.learning_rate"),
        ("--grpo.beta", "--grpo.kl_coefficient"),
        ("--num-generations", "--run.group_size"),
        ("--rollout.n", "--run.group_size"),
        ("--tensor-model-parallel-size", "--learner.tensor_parallel"),
        ("--learner.temperature", "--rollout.temperature"),
        ("--max_grad_norm=1.0", "--learner.clip_grad"),
        ("--data.train_files", "--tasks.path"),
        ("--report_to", "--metrics."),
    ],
)
def test_an_unknown_option_is_refused_with_the_setting_that_is_meant(option: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option {option.partition('=')[0]}") as refused:
        load_config([option, "2"])
    assert f"did you mean {meant}" in refused.value.remedy


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("learner.lr = 1e-5", "'learning_rate'"),
        ("grpo.beta = 0.1", "'kl_coefficient'"),
        ("grpo.num_generations = 4", "[run] group_size"),
        ("run.temperature = 0.7", "[rollout] temperature"),
        ("learning_rate = 1e-5", "[learner] learning_rate"),
        ("lora_r = 8", "[learner] lora_rank"),
    ],
)
def test_names_of_other_trainers_are_understood_in_a_file(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_table(tomllib.loads(text), "c.toml")
    assert f"did you mean {hint}?" in refused.value.remedy


def test_synonyms_name_settings_and_none_hides_one() -> None:
    known = settings()
    assert set(SYNONYMS.values()) <= known.keys(), set(SYNONYMS.values()) - known.keys()
    assert len(SYNONYMS) == sum(len(names.split()) for names in _NAMES.values()), "a synonym stands twice"


def test_a_configuration_survives_its_own_file() -> None:
    config = load_config(["--objective", "opd", "--rollout.cpu_cores", "1", "--learner.megatron.moe_x", "true"])
    assert from_table(tomllib.loads(to_toml(config)), "config.toml") == config


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        load_config(words)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_all_of_it_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = help_of(["--help"], capsys), help_of(["--help", "all"], capsys)
    assert short.index("torchrun --nproc-per-node") < short.index("--objective") < short.index("--learner.model")
    assert 20 <= short.count("\n  --") <= 40 and "--help all" in short
    for name in settings():
        assert re.search(rf"^  --{re.escape(name)}\b", whole, re.MULTILINE), name
    assert set(SHORT) <= settings().keys()
    one = help_of(["--help", "learner"], capsys)
    assert "--learner.adam_beta1" in one and "\n  --run.name" not in one and "{float32, bfloat16, float64}" in one
    with pytest.raises(ConfigError, match="--help lerner"):
        load_config(["--help", "lerner"])


def test_help_shows_the_values_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("run.updates = 4321")
    assert "4321" in help_of(["--config", str(tmp_path / "c.toml"), "--help"], capsys)


def test_every_setting_is_read_by_somebody() -> None:
    """A setting that nothing reads does nothing: it is named here."""
    package = Path(config_module.__file__).parent.parent
    sections = {name: kind for name, (kind, _) in annotations(Config).items() if dataclasses.is_dataclass(kind)}
    texts = {p: p.read_text() for p in package.rglob("*.py")}
    unread = []
    for section, kind in sections.items():
        own = Path(inspect.getsourcefile(kind) or "")  # type: ignore[arg-type]
        declared = re.compile(r"^    \w+: .*$", re.MULTILINE)
        text = "".join(declared.sub("", t) if p == own else t for p, t in texts.items() if "help" not in p.name)
        unread += [f"{section}.{key}" for key in annotations(kind) if not re.search(rf"\.{key}\b", text)]
    assert not unread, unread


def test_own_parts_of_a_file_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the top level."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.py").write_text("")
    (project / "c.toml").write_text('objective = "mine.py:build"\nreward.function = ["mine.py:score", "boxed"]\n')
    monkeypatch.chdir(tmp_path)
    config = load_config(["--config", "project/c.toml"])
    assert config.objective == f"{project}/mine.py:build"
    assert config.reward.function == (f"{project}/mine.py:score", "boxed")


def test_every_setting_has_a_sentence() -> None:
    bare = []
    for kind in [Config, *(f.default_factory for f in dataclasses.fields(Config) if callable(f.default_factory))]:
        body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
        for node, after in zip(body, [*body[1:], None], strict=True):
            section_of_its_own = kind is Config and "field(" in ast.unparse(node)
            if isinstance(node, ast.AnnAssign) and not isinstance(after, ast.Expr) and not section_of_its_own:
                bare.append(f"{kind.__name__}.{ast.unparse(node.target)}")
    assert not bare, f"settings without a docstring: {bare}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_loads(path: Path) -> None:
    assert isinstance(load_config(["--config", str(path)]), Config)


def test_loading_is_quick_and_free_of_torch() -> None:
    program = (
        "import sys; from megathunder.config.load import load_config; import megathunder.config.checks;"
        "load_config([]); assert not {'torch', 'sglang', 'transformers', 'megatron'} & set(sys.modules)"
    )
    started = time.process_time()
    before = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True)
    assert time.monotonic() - before < 5, "generous: the machine may be busy"
    assert time.process_time() - started < 1
