"""Marks of tool calls as ordinary text: the same weights and template, a tokenizer that spells the marks out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.conftest import FindModel
from turngate.trainer import models
from turngate.trainer.models import Embedded, resolve_model
from turngate.trainer.plain_marks import MarksError, main, write_plain

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>\n'


def test_marks_are_spelt_out_and_all_else_is_as_it_was(
    model_dir: FindModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_dir("qwen-coder-0.5b")
    assert main([str(folder), str(tmp_path / "plain")]) == 0
    assert {"<tool_call>", "</tool_call>"} <= set(json.loads(capsys.readouterr().out))
    before, after = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert [after.decode([token]) for token in after.encode("<tool_call>")] == ["<", "tool", "_call", ">"]
    assert len(before.encode("<tool_call>")) == 1
    assert after.decode(after.encode(CALL)) == CALL
    assert after.encode("<|im_end|>") == before.encode("<|im_end|>")
    assert after.encode("two words, {} and \u00e9") == before.encode("two words, {} and \u00e9")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": CALL}]
    assert after.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(messages, tokenize=False)
    assert (tmp_path / "plain" / "model.safetensors").samefile(folder / "model.safetensors")


def test_what_cannot_be_made_is_said_and_leaves_nothing(model_dir: FindModel, tmp_path: Path) -> None:
    with pytest.raises(MarksError, match=r"no tokenizer\.json"):
        write_plain(tmp_path, tmp_path / "out")
    with pytest.raises(MarksError, match="no added token that is not special"):
        write_plain(model_dir("smollm2-135m"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(MarksError, match="is there already"):
        write_plain(model_dir("qwen-coder-0.5b"), tmp_path)


def test_the_embedded_plain_model_is_made_of_the_other(
    model_dir: FindModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base").symlink_to(model_dir("qwen-coder-0.5b"))
    monkeypatch.setitem(models.EMBEDDED, "base", Embedded("the base", {}))
    monkeypatch.setitem(models.EMBEDDED, "base-plain", Embedded("made of it", {}, plain_of="base"))
    made = Path(resolve_model("base-plain"))
    assert made == tmp_path / "models" / "base-plain"
    assert len(AutoTokenizer.from_pretrained(made).encode("<tool_call>")) == 4
    assert resolve_model("base-plain") == made
    assert [path.name for path in (tmp_path / "models").iterdir() if path.name.startswith(".")] == []
