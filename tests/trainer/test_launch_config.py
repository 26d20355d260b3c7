"""The launch file: overrides, errors that name the right key, and a resolved form that reads back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from turngate.trainer import launch_config
from turngate.trainer.launch_config import ConfigError, Places
from turngate.trainer.warm_start import demonstration_settings, sft_settings

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"


def minimal(**changes: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "run": {}, "train": {}, **changes}


def message_of(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        launch_config.parse(raw)
    return str(caught.value)


def test_the_demo_is_valid_and_small_enough_to_be_one() -> None:
    config = launch_config.load(DEMO)
    assert config.train.steps >= 5
    assert config.train.lora_r <= config.engine.max_lora_rank


def test_overrides_win_over_the_file_and_are_read_as_yaml() -> None:
    config = launch_config.load(DEMO, ["train.learning_rate=1e-5", "train.steps=7", "engine.extra_args=[--seed, '1']"])
    assert config.train.learning_rate == 1e-5
    assert config.train.steps == 7
    assert config.engine.extra_args == ["--seed", "1"]


def test_an_override_may_open_a_section_the_file_leaves_out() -> None:
    raw = minimal()
    launch_config.apply_override(raw, "gateway.policy=coder")
    assert launch_config.parse(raw).gateway.policy == "coder"


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", "model.name=x", "train.steps=[1"])
def test_a_broken_override_is_an_error_that_quotes_it(override: str) -> None:
    with pytest.raises(ValueError, match="override"):
        launch_config.apply_override(minimal(), override)


@pytest.mark.parametrize(
    ("raw", "wrong", "right"),
    [
        (minimal(train={"stepps": 1}), "train.stepps", "train.steps"),
        (minimal(modell="x"), "modell", "model"),
        (minimal(engine={"max_lora": 1}), "engine.max_lora", "engine.max_loras"),
        (minimal(run={"harness_options": {"tool": False}}), "run.harness_options.tool", "run.harness_options.tools"),
        (minimal(learning_rate=1e-5), "learning_rate", "train.learning_rate"),
        (minimal(run={"max_model_len": 4096}), "run.max_model_len", "engine.max_model_len"),
    ],
)
def test_an_unknown_key_is_an_error_that_suggests_the_right_one(raw: dict[str, Any], wrong: str, right: str) -> None:
    assert f"{wrong}: unknown key, did you mean {right}?" in message_of(raw)


def test_every_wrong_key_is_named_at_once() -> None:
    message = message_of(minimal(train={"stepps": 1, "steps": 0}, engine={"port": 70000}))
    assert {line.partition(":")[0] for line in message.splitlines()} == {"train.stepps", "train.steps", "engine.port"}


def test_a_missing_key_says_how_to_set_it() -> None:
    assert "model: missing; set it in the file or as model=VALUE" in message_of({"run": {}, "train": {}})


@pytest.mark.parametrize(
    ("part", "key"), [(part, key) for part, keys in launch_config.SET_BY_LAUNCHER.items() for key in keys]
)
def test_what_follows_from_the_launch_may_not_stand_in_the_file(part: str, key: str) -> None:
    raw = minimal()
    raw[part] = {key: "x"}
    assert f"{part}.{key}: follows from the launch" in message_of(raw)


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    assert "lora_r" in message_of(minimal(train={"lora_r": 32}, engine={"max_lora_rank": 16}))
    assert "temperature" in message_of(minimal(run={"sampling": {"temperature": 0.5}}))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"top_p": 0.95}, "run.sampling.top_p=0.95"),
        ({"top_k": 20}, "log-probs of a cut or bent distribution"),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, "run.sampling.repetition_penalty=1.1"),
        ({"logit_bias": {"5": 2.0}}, "never trained"),
        ({"seed": 3}, "one and the same"),
    ],
)
def test_sampling_that_the_trainers_weights_do_not_know_is_refused(sampling: dict[str, Any], words: str) -> None:
    assert words in message_of(minimal(run={"sampling": sampling}))


def test_sampling_of_the_whole_distribution_is_not_refused_and_evaluations_may_sample_otherwise() -> None:
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "max_tokens": 9, "stop": ["x"]}
    config = launch_config.parse(minimal(run={"sampling": whole}, eval={"sampling": {"top_p": 0.9, "seed": 1}}))
    assert config.run.sampling == whole


def test_the_resolved_file_reads_back_equal(tmp_path: Path) -> None:
    config = launch_config.load(DEMO, ["train.steps=9"])
    path = tmp_path / "config.yaml"
    path.write_text(launch_config.dump(config))
    assert launch_config.load(path) == config


def test_runner_and_trainer_get_settings_that_agree() -> None:
    config = launch_config.load(DEMO, ["gateway.policy=words"])
    places = Places("http://127.0.0.1:1", Path("/run/store/admin.key"), Path("/run"), "/models/m", "http://127.0.0.1:2")
    runner, trainer = launch_config.runner_settings(config, places), launch_config.trainer_settings(config, places)
    assert (runner.gateway, runner.policy) == (trainer.gateway, trainer.policy) == ("http://127.0.0.1:1", "words")
    assert trainer.output == Path("/run")
    assert trainer.model == "/models/m"
    for settings in (runner, trainer):
        assert (
            type(settings).model_validate(yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))) == settings
        )


@pytest.mark.parametrize("text", ["[1, 2]", "model: [", ""])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        launch_config.load(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        launch_config.load(tmp_path / "none.yaml")


def test_a_warm_start_says_where_the_adapter_comes_from_and_nothing_twice(tmp_path: Path) -> None:
    warm = {"demonstrations": {"tasks": "dataops:train", "limit": 64}, "sft": {"epochs": 2}}
    config = launch_config.parse(minimal(warm_start=warm, train={"lora_r": 4, "seed": 7}))
    places = Places("http://127.0.0.1:1", tmp_path / "key", tmp_path, "/models/m", "http://127.0.0.1:2")
    assert config.warm_start is not None
    assert config.warm_start.demonstrations is not None
    run = launch_config.runner_settings(config, places)
    shown = demonstration_settings(run, config.warm_start.demonstrations, tmp_path / "demonstrations")
    assert (shown.tasks, shown.teacher, shown.groups, shown.training) == ("dataops:train", "oracle", 64, False)
    assert (shown.gateway, shown.out) == (run.gateway, tmp_path / "demonstrations")
    learnt = sft_settings(launch_config.trainer_settings(config, places), config.warm_start, places.store, tmp_path)
    assert (learnt.model, learnt.store, learnt.lora_r, learnt.seed) == ("/models/m", tmp_path / "store", 4, 7)
    assert (learnt.epochs, learnt.where) == (2, "demonstration and (reward >= 1)")
    assert "exactly one" in message_of(minimal(warm_start={"adapter": "a", "store": "b"}))
    assert "warm_start.demonstrations.limits" in message_of(minimal(warm_start={"demonstrations": {"limits": 1}}))
    assert "train.adapter: follows from the launch" in message_of(minimal(train={"adapter": "a"}))
