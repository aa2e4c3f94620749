"""Each check across sections refuses what breaks it and says how to fix it; the legal configuration passes quickly."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megathunder.config import Config, speculation_checks
from megathunder.config.checks import check, notes
from megathunder.config.load import load_config
from megathunder.errors import ConfigError, UserError
from tests.unit.config.config_cases import change, legal, model_folder

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))
REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"run__group_size": 1}, "group_size = 1", "run.group_size"),
    ({"run__group_size": 1, "grpo__advantage": "leave_one_out"}, "leave_one_out", "run.group_size"),
    ({"run__group_size": 1, "grpo__advantage": "sample_std"}, "sample_std", "run.group_size"),
    ({"run__group_control": "sagc", "objective": "opd"}, "objective = 'opd'", "fixed"),
    ({"run__group_control": "sagc", "sagc__sizes": (8, 4)}, "[8, 4]", "[4, 8, 16]"),
    ({"run__group_control": "sagc", "run__group_size": 6}, "group_size = 6", "run.group_size = 4"),
    ({"run__group_control": "sagc", "sagc__target_rate": 1.0}, "target_rate = 1.0", "0.3"),
    ({"salt__amplification": 1.0, "learner__shared_prompt": "group"}, "shared_prompt = 'group'", "shared_prompt"),
    ({"salt__measure": True, "learner__tensor_parallel": 2}, "tensor_parallel = 2", "salt.amplification = 0"),
    ({"salt__amplification": 1.0, "objective": "opd"}, "objective = 'opd'", "measure = false"),
    ({"salt__severe_cancellation": 1.0}, "severe_cancellation = 1.0", "0.5"),
    (
        {"salt__amplification": 1.0, "salt__scope": "batch", "streaming__max_open_groups": 4},
        "max_open_groups = 4",
        "max_open_groups = 8",
    ),
    ({"tasks__size": 3, "run__groups_per_update": 4, "tasks__wrap": False}, "tasks.size = 3", "wrap"),
    ({"tasks__kinds": ("read", "cound")}, "tasks.kinds names cound", "correct the names"),
    ({"tasks__source": "math", "tasks__kinds": ("read",)}, "tasks.source = 'math'", "correct the names"),
    ({"tasks__heldout": 10**9}, "tasks.heldout = 1000000000", "64"),
    ({"tasks__heldout": 0}, "tasks.heldout = 0", "evaluate_every = 0"),
    ({"objective": "opd", "rollout__temperature": 0.7}, "rollout.temperature = 0.7", "temperature = 1.0"),
    ({"objective": "opd", "opd__teacher": ""}, "opd.teacher = ''", "opd.teacher"),
    ({"streaming__release": "turn"}, "release = 'turn'", "turn_forward"),
    ({"objective": "opd", "streaming__content_ready": True}, "content_ready = true", "content_ready = false"),
    ({"schedule": "one_step_off", "streaming__release": "turn_forward"}, "one_step_off", "thundersync"),
    ({"schedule": "one_step_off", "streaming__content_ready": True}, "one_step_off", "content_ready = false"),
    ({"grpo__clip_low": 0.2, "grpo__importance_cap": 2.0}, "importance_cap", "importance_cap = 0"),
    ({"grpo__clip_low": 1.0}, "clip_low = 1.0", "0.2"),
    ({"grpo__importance_cap": 0.5}, "importance_cap = 0.5", "2.0"),
    ({"grpo__dynamic_sampling": True}, "max_replacements = 0", "max_replacements = 8"),
    ({"grpo__kl_in_reward": True}, "kl_coefficient = 0", "kl_in_reward = false"),
    (
        {"grpo__kl_coefficient": 0.1, "streaming__content_ready": True},
        "kl_coefficient = 0.1 with streaming.content_ready = true",
        "or change streaming.content_ready",
    ),
    ({"grpo__overlong_buffer_tokens": 512}, "overlong_buffer_tokens = 512", "128"),
    ({"rollout__max_new_tokens": 512}, "max_new_tokens = 512", "max_tokens"),
    ({"streaming__pack_tokens": 100}, "pack_tokens = 100", "pack_tokens = 512"),
    ({"rollout__max_total_tokens": 100}, "max_total_tokens = 100", "max_total_tokens"),
    ({"rollout__max_tokens": 2048}, "max_position_embeddings = 1024", "1024"),
    ({"run__updates": 0}, "run.updates = 0", "40"),
    ({"run__seed": -1}, "run.seed = -1", "0"),
    ({"learner__learning_rate": float("nan")}, "learning_rate = nan", "0.0005"),
    ({"salt__sketch_dimension": 10**10}, "sketch_dimension = 10000000000", "4096"),
    ({"rollout__urls": ("127.0.0.1:30000",)}, "rollout.urls names '127.0.0.1:30000'", "correct rollout.urls"),
    ({"rollout__urls": ("http://a:1", "http://a:port")}, "rollout.urls names 'http://a:port'", "correct rollout.urls"),
    ({"opd__teacher_urls": ("http://",)}, "opd.teacher_urls names 'http://'", "correct opd.teacher_urls"),
    ({"rollout__top_p": 1.5}, "top_p = 1.5", "1.0"),
    ({"rollout__temperature": 0.0}, "temperature = 0.0", "1.0"),
    ({"learner__tensor_parallel": 3}, "4 attention heads", "1, 2, 4"),
    ({"learner__tensor_parallel": 4}, "2 key-value heads", "1, 2"),
    ({"learner__pipeline_parallel": 5}, "4 layers", "4 or less"),
    ({"learner__expert_parallel": 2}, "1 experts", "expert_parallel"),
    ({"learner__virtual_pipeline": 3}, "pipeline_parallel = 1", "virtual_pipeline = 1"),
    ({"learner__expert_tensor_parallel": 2}, "2 x 1 x 1", "--nproc-per-node 2"),
    ({"learner__tensor_parallel": 2}, "1 learner rank(s)", "--nproc-per-node 2"),
    ({"learner__accumulator_shards": 2}, "1 rank(s) hold the same parameters", "accumulator_shards = 1"),
    ({"learner__sequence_parallel": True}, "tensor_parallel = 1", "sequence_parallel = false"),
    ({"rollout__cpu_cores": (4096,)}, "[4096]", "cpu_cores = []"),
    ({"learner__cpu_cores": (4096,)}, "learner.cpu_cores", "cpu_cores = []"),
    ({"learner__device": "gpu"}, "'gpu'", "auto"),
    ({"rollout__host": "0.0.0.0"}, "no rollout.api_key", "127.0.0.1"),
    ({"rollout__agent": "command"}, "no rollout.agent_command", "mini_swe_agent.py"),
    (
        {"rollout__agent": "command", "rollout__agent_command": "python nowhere.py"},
        "agent_command names nowhere.py",
        "correct the name",
    ),
    ({"sandbox__lifetime_s": 100.0}, "lifetime_s = 100 with rollout.deadline_s = 120", "210"),
    ({"sandbox__backend": "remote"}, "no sandbox.urls", "serve_sandboxes.py"),
    (
        {"sandbox__backend": "remote", "sandbox__urls": ("http://192.0.2.1:7070",)},
        "192.0.2.1:7070 with no sandbox.api_key",
        "sandbox.api_key",
    ),
    ({"sandbox__backend": "docker", "sandbox__container_user": "0:0"}, "container_user = '0:0'", "1000:1000"),
    ({"publish__min_servers": 2}, "min_servers = 2", "rollout.servers = 2"),
    ({"publish__transport": "disk", "publish__folder": "/dev/null/x"}, "/dev/null is no folder", "publish.folder"),
    ({"publish__lora": "adapter"}, "learner.lora_rank = 0", "publish.lora = 'merged'"),
    (
        {"publish__lora": "adapter", "learner__lora_rank": 8, "publish__checksum": False},
        "publish.checksum = false",
        "publish.lora = 'merged'",
    ),
    (
        {"publish__lora": "adapter", "learner__lora_rank": 8, "learner__dtype": "float64"},
        "'float64'",
        "publish.lora = 'merged'",
    ),
    (
        {"rollout__speculation": "suffix", "speculation__low_load_requests": 24.0},
        "low_load_requests = 24",
        "high_load_requests = 72",
    ),
    ({"rollout__speculation": "suffix", "speculation__max_draft_tokens": 64}, "max_draft_tokens = 64", "520"),
    ({"rollout__speculation": "suffix", "rollout__sglang": {"tp_size": "2"}}, "sglang.tp_size = 2", "leave out"),
    ({"speculation__max_draft_tokens": 0}, "max_draft_tokens = 0", "7"),
    ({"run__name": "../x"}, "'../x'", "run.folder"),
    ({"run__resume": True, "run__overwrite": True}, "run.overwrite", "--run.overwrite"),
    ({"learner__model": "/nowhere/at/all"}, "no such folder", "learner.model"),
    ({"objective": "opd", "opd__teacher": "/nowhere/at/all"}, "no such folder", "opd.teacher"),
]


@pytest.mark.parametrize(("settings", "seen", "remedy"), REFUSED, ids=["+".join(case[0]) for case in REFUSED])
def test_what_cannot_work_is_refused_with_the_remedy(
    tmp_path: Path, settings: dict[str, object], seen: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(change(legal(tmp_path), **settings), ranks=1)
    assert seen in refused.value.seen
    assert remedy in refused.value.remedy


def test_a_number_that_is_not_finite_is_said_to_have_to_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check(change(legal(tmp_path), run__stop_timeout_s=float("inf")), ranks=1)
    assert refused.value.expected == "a finite number, more than 0"


def test_the_legal_configuration_passes_in_under_a_second(tmp_path: Path) -> None:
    config = legal(tmp_path)
    started = time.monotonic()
    check(config, ranks=1)
    check(change(config, objective="opd", streaming__release="turn"), ranks=1)
    assert time.monotonic() - started < 1


def test_accumulators_are_shared_by_whole_cells(tmp_path: Path) -> None:
    config = legal(tmp_path)
    check(change(config, learner__accumulator_shards=2), ranks=4)
    check(change(config, learner__accumulator_shards=4, learner__context_parallel=2), ranks=4)
    for settings, seen in (
        ({"learner__accumulator_shards": 3}, "accumulator_shards = 3, 4 rank"),
        ({"learner__accumulator_shards": 3, "learner__context_parallel": 2}, "2 of them coupled"),
        ({"learner__accumulator_shards": 2, "learner__shared_prompt": "group"}, "shared_prompt = 'group'"),
    ):
        with pytest.raises(ConfigError) as refused:
            check(change(config, **settings), ranks=4)
        assert seen in refused.value.seen


def test_two_ranks_carry_two_way_layouts(tmp_path: Path) -> None:
    check(change(legal(tmp_path), learner__tensor_parallel=2, learner__sequence_parallel=True), ranks=2)
    moe = model_folder(tmp_path / "moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    check(change(legal(tmp_path), learner__model=moe, learner__expert_parallel=2), ranks=2)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}") as refused:
            check(change(legal(tmp_path), rollout__port=port), ranks=1)
    assert "rollout.port = 0" in refused.value.remedy


def test_no_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="bwrap") as refused:
        check(legal(tmp_path), ranks=1)
    assert "apt-get install bubblewrap" in refused.value.remedy


def test_a_daemon_or_a_sandbox_server_that_does_not_answer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    started, absent = time.monotonic(), f"unix://{tmp_path}/none.sock"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for settings, seen, remedy in (
            ({"backend": "docker", "docker_host": absent}, f"no Docker daemon at {absent}", "start dockerd"),
            ({"backend": "docker", "docker_host": "tcp://127.0.0.1:no"}, "no Docker daemon at tcp", "docker_host"),
            ({"backend": "remote", "urls": (url,)}, f"{url!r} was not reached", "serve_sandboxes.py"),
            ({"backend": "remote", "urls": ("foo",)}, "sandbox.urls names 'foo'", "sandbox.urls"),
        ):
            config = change(legal(tmp_path), **{f"sandbox__{name}": value for name, value in settings.items()})
            with pytest.raises(UserError) as refused:
                check(config, ranks=1)
            assert seen in refused.value.seen and remedy in refused.value.remedy
            check(config, ranks=1, samples=False)  # recorded trajectories have no sandbox
    assert time.monotonic() - started < 5


def test_wandb_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megathunder.config.machine_checks.find_spec", lambda name: None)
    check(legal(tmp_path), ranks=1)
    with pytest.raises(ConfigError, match="wandb is not installed") as refused:
        check(change(legal(tmp_path), metrics__sinks=("wandb",)), ranks=1)
    assert "pip install -e .[wandb]" in refused.value.remedy


def test_a_sink_that_is_none_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Whole:\n    def __init__(self, config, folder): ...\n    def row(self, row): ...\n"
        "    def close(self): ...\nclass Half:\n    def __init__(self, config, folder): ...\n"
        "    def row(self, row): ...\n"
    )
    check(change(legal(tmp_path), metrics__sinks=(f"{tmp_path}/own.py:Whole",)), ranks=1)
    for named, said in (("wandbb", "did you mean 'wandb'"), (f"{tmp_path}/own.py:Half", "define close")):
        with pytest.raises(ConfigError, match="sink") as refused:
            check(change(legal(tmp_path), metrics__sinks=(named,)), ranks=1)
        assert said in refused.value.remedy


def test_a_folder_that_holds_a_run_is_refused_until_told_what_to_do(tmp_path: Path) -> None:
    config = legal(tmp_path)
    folder = Path(config.run.folder) / config.run.name
    folder.mkdir(parents=True)
    check(config, ranks=1)
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        check(config, ranks=1)
    check(change(config, run__resume=True), ranks=1)
    check(change(config, run__overwrite=True), ranks=1)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_with_a_file_missing_is_refused(tmp_path: Path, file: str) -> None:
    config = legal(tmp_path)
    (Path(config.learner.model) / file).unlink()
    with pytest.raises(ConfigError) as refused:
        check(config, ranks=1)
    assert "learner.model" in refused.value.seen
    assert ("weights" if file == "model.safetensors" else file) in refused.value.seen


def test_a_broken_model_config_is_refused(tmp_path: Path) -> None:
    config = legal(tmp_path)
    for text, words in (("{", "config.json"), ("[]", "holds no object"), ("{}", "names no architecture")):
        (Path(config.learner.model) / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            check(config, ranks=1)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = change(legal(tmp_path), objective="opd")
    model_folder(tmp_path / "teacher", tokens=("b", "a"))
    with pytest.raises(ConfigError, match="differs from learner.model's") as refused:
        check(config, ranks=1)
    assert "2 tokens, first 'a'" in refused.value.seen


def test_tokenizers_may_differ_in_what_is_not_vocabulary(tmp_path: Path) -> None:
    config = change(legal(tmp_path), objective="opd")
    file = Path(config.opd.teacher) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding": None}))
    check(config, ranks=1)


def test_a_running_teacher_needs_no_folder(tmp_path: Path) -> None:
    check(change(legal(tmp_path), objective="opd", opd__teacher="", opd__teacher_urls=("http://t:1",)), ranks=1)


def test_legal_and_probably_unintended_settings_are_remarked_on(tmp_path: Path) -> None:
    config = legal(tmp_path)
    assert notes(config) == []
    for settings, words in (
        ({"tasks__max_turns": 60}, "max_tokens"),
        ({"rollout__top_p": 0.9}, "top_p"),
        ({"learner__accumulator": "exact", "learner__dtype": "bfloat16"}, "exact"),
        ({"grpo__clip_high": 0.2}, "every ratio is 1"),
        ({"schedule": "one_step_off"}, "one version old"),
        ({"schedule": "sync", "streaming__content_ready": True}, "no effect"),
        ({"tasks__size": 3}, "twice"),
    ):
        assert any(words in note for note in notes(change(config, **settings))), settings


def test_speculation_needs_the_plug_in_and_the_cache_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = change(legal(tmp_path), rollout__speculation="suffix", speculation__cache="arctic")
    monkeypatch.setattr(speculation_checks, "entry_points", lambda group: [])
    with pytest.raises(ConfigError) as refused:
        check(config, ranks=1)
    assert "megathunder_suffix_speculation" in refused.value.seen and "setup.sh" in refused.value.remedy
    monkeypatch.setattr(
        speculation_checks, "entry_points", lambda group: [SimpleNamespace(name=speculation_checks.PLUGIN)]
    )
    monkeypatch.setattr(speculation_checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        check(config, ranks=1)
    assert "arctic" in refused.value.seen and "patterns" in refused.value.remedy
    check(change(config, rollout__urls=("http://127.0.0.1:1",)), ranks=1)  # started elsewhere


def test_the_stall_limit_never_cuts_what_other_limits_allow() -> None:
    """A trajectory may take its deadline and its grading, as often as it is tried, and its reward functions."""
    config = change(
        Config(),
        streaming__stall_timeout_s=1.5,
        rollout__deadline_s=100.0,
        rollout__max_retries=1,
        sandbox__grading_budget_s=10.0,
        reward__function=("a.py:f", "boxed"),
        reward__timeout_s=5.0,
    )
    assert config.stall_limit_s > 2 * (100 + 10 + 2 * 5)
    assert change(config, streaming__stall_timeout_s=9000.0).stall_limit_s == 9000.0
    for example in EXAMPLES:
        loaded = load_config(["--config", str(example)])
        assert loaded.stall_limit_s > loaded.rollout.deadline_s + loaded.sandbox.grading_budget_s
