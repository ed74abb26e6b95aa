"""Hugging Face: a tiny model called with a batch, Trainer, its encodings, tokenizers and datasets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import check_invariants, fails
from torch import Tensor
from torch.utils.data import DataLoader

from tensordict_lite import DeviceDict, DeviceMismatchError, Tokenizer, TypedDeviceDict, collate, load

transformers = pytest.importorskip("transformers")
from accelerate.data_loader import prepare_data_loader  # noqa: E402
from transformers import (  # noqa: E402
    BatchEncoding,
    BatchFeature,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    Trainer,
    TrainingArguments,
)


class Batch(TypedDeviceDict):
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def tiny() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=30,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=2,
        )
    )


def samples(cls: type[Any]) -> list[Any]:
    return [
        cls({"input_ids": torch.arange(5) + i, "attention_mask": torch.ones(5, dtype=torch.int64), "labels": i % 2})
        for i in range(8)
    ]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return BertTokenizer(str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize("cls", [DeviceDict, Batch])
def test_a_model_is_called_with_a_batch(cls: type[Any]) -> None:
    model = tiny().eval()
    batch = collate(samples(cls))
    out = model(**batch)
    plain = model(**batch.to_dict())
    assert torch.equal(out.logits, plain.logits) and out.loss == plain.loss
    outputs = DeviceDict(out)  # a ModelOutput is a mapping too
    assert torch.equal(outputs["logits"], plain.logits)


@pytest.mark.parametrize("cls", [DeviceDict, Batch])
def test_trainer(cls: type[Any], tmp_path: Path) -> None:
    seen: list[type] = []

    class Watching(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Watching(
        model=tiny(), args=arguments, train_dataset=samples(cls), eval_dataset=samples(cls), data_collator=collate
    )
    assert trainer.train().global_step == 3
    metrics = trainer.evaluate()
    predicted = trainer.predict(samples(cls))
    assert metrics["eval_loss"] > 0 and predicted.predictions.shape == (8, 2) and set(seen) == {cls}


def test_trainer_moves_ragged_fields() -> None:
    """`Trainer` gets batches from a loader of accelerate, which moves them. What it does after that changes nothing."""
    meta, rows = torch.device("meta"), [{"ids": [1, 2], "x": 1.0}, {"ids": [3], "x": 2.0}]
    trainer: Any = SimpleNamespace(args=SimpleNamespace(device=meta), is_deepspeed_enabled=False)
    trainer._prepare_input = partial(Trainer._prepare_input, trainer)

    def bare(samples: Any) -> Any:
        return {"ids": collate(samples, ragged=["ids"])["ids"]}

    for join in (partial(collate, ragged=["ids"]), bare):
        loader: Any = prepare_data_loader(DataLoader(rows, 2, collate_fn=join), meta, 1, 0, put_on_device=True)  # type: ignore[arg-type]
        (batch,) = loader
        out = trainer._prepare_input(batch)
        assert type(out) is type(batch) and out["ids"].device == meta and out["ids"].max_length == 2
    elsewhere = collate(rows, ragged=["ids"])
    fails(DeviceMismatchError, r"^'x' is on meta, this DeviceDict is on cpu", lambda: trainer._prepare_input(elsewhere))


def test_encodings(tokenizer: Any) -> None:
    encoding = tokenizer(["the cat", "the cat sat"], padding=True, return_tensors="pt")
    assert isinstance(encoding, BatchEncoding)
    d = DeviceDict(encoding)
    check_invariants(d)
    assert list(d) == list(encoding) and d["input_ids"] is encoding["input_ids"] and d.device == torch.device("cpu")
    assert DeviceDict(tokenizer(["the cat", "cat sat"]))["input_ids"].shape == (2, 4)  # lists of numbers
    assert encoding.to("meta") is encoding and d.to("meta") is not d and d.device == torch.device("cpu")
    feature = BatchFeature({"pixel_values": [[0.5, 1.0]]}, tensor_type="np")
    assert DeviceDict(feature)["pixel_values"].tolist() == [[0.5, 1.0]]


def test_a_tokenizer_as_encoder(tokenizer: Any, tmp_path: Path) -> None:
    encoder = Tokenizer(tokenizer)
    d = DeviceDict({"text": ["the cat", "cats"]}, encoders={"text": encoder})
    assert d["text", "input_ids"].shape == (2, 4) and d.decode("text") == ["the cat", "cats"]
    batch = collate([{"text": "the cat", "y": 1}, {"text": "the cat sat", "y": 0}], encoders={"text": encoder})
    assert batch["text", "attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]] and batch.is_packed
    d.save(tmp_path / "d")
    fails(ValueError, r"'text' was encoded with a tokenizer; load does not build it", lambda: load(tmp_path / "d"))
    assert load(tmp_path / "d", encoders={"text": encoder}).decode("text") == ["the cat", "cats"]


def test_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "label": [0, 1, 0], "text": ["a", "bb", "c"]}
    )
    for rows in (table, table.with_format("torch"), table.with_format("numpy"), table.to_iterable_dataset()):
        loader: Any = DataLoader(rows, batch_size=3, collate_fn=collate)
        batch = next(iter(loader))
        check_invariants(batch)
        assert batch["x"].tolist() == [[1, 2], [3, 4], [5, 6]] and batch["label"].tolist() == [0, 1, 0]
        assert batch.decode("text") == ["a", "bb", "c"]
    columns = DeviceDict(table[:2])
    assert columns["x"].shape == (2, 2) and columns.decode("text") == ["a", "bb"]
