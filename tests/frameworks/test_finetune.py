"""The example that fine-tunes a Hugging Face model, and its twin in plain dicts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tensordict_lite import DeviceDict

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_model_learns_all_answers(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example: Any = importlib.import_module("finetune")
    monkeypatch.setattr(sys, "argv", ["finetune"])
    example.main()
    printed = capsys.readouterr().out
    assert "6 of 6 right" in printed and "a duck -> says quack quack" in printed

    spec = importlib.util.spec_from_file_location("plain_finetune", EXAMPLES / "plain_finetune.py")
    assert spec and spec.loader
    plain: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    samples = example.training_samples()
    rows = [sample.tolist() for sample in samples]
    assert example.collate_training(samples) == DeviceDict(plain.collate_training(rows))
    prompts = [{"input_ids": row["input_ids"]} for row in rows]
    assert example.collate_prompts(prompts) == DeviceDict(plain.collate_prompts(prompts))
