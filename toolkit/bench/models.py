"""Checkpoints of common sizes with random weights, and word-level tokenizers to go with them."""

import itertools
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.parity.loading import quiet

__all__ = ["SUITES", "Shape", "write_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of transformers, by its class and the fields of its configuration that are not the defaults."""

    name: str
    model: str
    task: str
    config: Mapping[str, Any] = field(default_factory=dict)


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA = {**_LARGE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}

SUITES: Mapping[str, tuple[Shape, ...]] = {
    "encoders": (
        Shape(name="BERT-base", model="BertModel", task="embed"),
        Shape(name="RoBERTa-large", model="RobertaModel", task="embed", config=_ROBERTA),
        Shape(name="ModernBERT-base", model="ModernBertModel", task="embed"),
        Shape(
            name="BERT-base reranker",
            model="BertForSequenceClassification",
            task="rerank",
            config={"num_labels": 1},
        ),
        Shape(
            name="RoBERTa-large reranker",
            model="RobertaForSequenceClassification",
            task="rerank",
            config={**_ROBERTA, "num_labels": 1},
        ),
    )
}


def write_checkpoint(shape: Shape, folder: Path, dtype: torch.dtype) -> int:
    """Write a checkpoint with seeded random weights and a tokenizer; returns the number of parameters."""
    import transformers

    made: Any = getattr(transformers, shape.model)
    torch.manual_seed(0)
    model = made(made.config_class(**shape.config)).to(dtype)
    with quiet():
        model.save_pretrained(folder)
    write_tokenizer(folder, model.config)
    return sum(parameter.numel() for parameter in model.parameters())


def write_tokenizer(folder: Path, config: Any) -> None:
    """Write a tokenizer with one id for each word, special tokens in front and behind, and the model's padding id."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    free = (number for number in range(config.vocab_size) if number != config.pad_token_id)
    special = {"[PAD]": config.pad_token_id, **dict(zip(("[UNK]", "[CLS]", "[SEP]", "[MASK]"), free, strict=False))}
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    core = Tokenizer(models.WordLevel({**special, **dict(zip(words, free, strict=False))}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    segment = int(getattr(config, "type_vocab_size", 0) > 1)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{segment} [SEP]:{segment}",
        special_tokens=[(name, special[name]) for name in ("[CLS]", "[SEP]")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=min(config.max_position_embeddings - 2, 512),
        model_input_names=["input_ids", *(["token_type_ids"] if segment else []), "attention_mask"],
        **{f"{name[1:-1].lower()}_token": name for name in special},
    ).save_pretrained(folder)
