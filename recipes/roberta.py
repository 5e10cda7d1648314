"""RoBERTa (Liu et al., 2019, https://arxiv.org/abs/1907.11692) and the models that are one in all but weights.

XLM-RoBERTa (Conneau et al., 2020) and CamemBERT (Martin et al., 2020). Reference: transformers' RobertaModel and its
namesakes.
"""

from dataclasses import replace
from functools import partial

from toolkit.config import ConfigReader
from toolkit.errors import CheckpointError
from toolkit.heads import TaskHead, lm_head, sequence_head, token_head
from toolkit.spec import EncoderSpec
from toolkit.weights import drop

from .bert import RECIPE as BERT
from .bert import spec as bert_spec


def spec(config: ConfigReader, *, vocab_size: int = 30522) -> EncoderSpec:
    """BERT's, with positions that start behind the padding token's and skip it."""
    base = bert_spec(config, vocab_size=vocab_size)
    pad = config.integer("pad_token_id", 1, minimum=0)
    usable = base.embedding.positions - pad - 1
    if usable < 1:
        rows = base.embedding.positions
        raise CheckpointError(f"config.json: max_position_embeddings = {rows} ends before pad_token_id = {pad}")
    embedding = replace(base.embedding, position_start=pad + 1, position_pad=pad)
    return replace(base, usable_length=usable, embedding=embedding)


def heads(name: str) -> tuple[TaskHead, ...]:
    """The heads of the classes that begin with `name`."""
    return (
        sequence_head(f"{name}ForSequenceClassification", "tanh", "classifier.dense", "classifier.out_proj"),
        token_head(f"{name}ForTokenClassification"),
        lm_head(f"{name}ForMaskedLM"),
    )


ROBERTA = replace(
    BERT,
    model_type="roberta",
    classes=("RobertaModel", "RobertaForMaskedLM"),
    spec=partial(spec, vocab_size=50265),
    prefixes=("roberta.",),
    rules=(
        *(rule for rule in BERT.rules if not rule.outside),
        drop("lm_head.{*}", why="the masked language model's head does not take part in embeddings", outside=True),
        drop("classifier.{*}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    heads=heads("Roberta"),
    irrelevant=BERT.irrelevant - {"pad_token_id"},
    tiny={
        **BERT.tiny,
        "model_type": "roberta",
        "architectures": ["RobertaModel"],
        "max_position_embeddings": 28,
        "type_vocab_size": 1,
        "pad_token_id": 3,
    },
    note="positions start at pad_token_id + 1; one segment as a rule",
)

RECIPES = (
    ROBERTA,
    replace(
        ROBERTA,
        model_type="xlm-roberta",
        spec=spec,
        classes=("XLMRobertaModel", "XLMRobertaForMaskedLM"),
        heads=heads("XLMRoberta"),
        tiny={**ROBERTA.tiny, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "pad_token_id": 4},
    ),
    replace(
        ROBERTA,
        model_type="camembert",
        spec=spec,
        classes=("CamembertModel", "CamembertForMaskedLM"),
        heads=heads("Camembert"),
        tiny={**ROBERTA.tiny, "model_type": "camembert", "architectures": ["CamembertModel"], "pad_token_id": 5},
    ),
)
