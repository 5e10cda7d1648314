"""ELECTRA (Clark et al., 2020, https://arxiv.org/abs/2003.10555); reference: transformers' ElectraModel."""

from dataclasses import replace

from toolkit.config import ConfigReader
from toolkit.heads import mlm_head, sequence_head, token_head
from toolkit.spec import EncoderSpec
from toolkit.weights import drop, rename

from .bert import RECIPE as BERT
from .bert import spec as bert_spec


def spec(config: ConfigReader) -> EncoderSpec:
    """BERT's, with embeddings of a width of their own; defaults are ElectraConfig's.

    There is a projection to the hidden size only where the two differ.
    """
    base = bert_spec(config, hidden_size=256, heads=4, inner=1024)
    width = config.integer("embedding_size", 128)
    projection = "none" if width == base.hidden else "after_norm"
    return replace(base, embedding=replace(base.embedding, width=width, projection=projection))


RECIPE = replace(
    BERT,
    model_type="electra",
    classes=("ElectraModel", "ElectraForMaskedLM", "ElectraForPreTraining"),
    spec=spec,
    prefixes=("electra.",),
    rules=(
        *(rule for rule in BERT.rules if not rule.outside and not rule.sources[0].startswith("pooler.")),
        rename("embeddings.projection.{p}", "embeddings_project.{p}"),
        *(
            drop(f"{name}.{{*}}", why="the pre-training heads do not take part in embeddings", outside=True)
            for name in ("discriminator_predictions", "generator_predictions", "generator_lm_head")
        ),
        drop("classifier.{*}", why="a classification head does not take part in embeddings", outside=True),
        drop("sequence_summary.{*}", why="a multiple choice head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    # Dropout is off at inference; pad tokens never reach a packed batch, and positions ignore them; summary_* is read
    # by the multiple choice head only.
    irrelevant=frozenset(
        """
        hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pad_token_id
        summary_type summary_use_proj summary_activation summary_last_dropout
        """.split()
    ),
    heads=(
        sequence_head("ElectraForSequenceClassification", "gelu", "classifier.dense", "classifier.out_proj"),
        token_head("ElectraForTokenClassification"),
        mlm_head(
            "ElectraForMaskedLM",
            dense="generator_predictions.dense",
            norm="generator_predictions.LayerNorm",
            decoder="generator_lm_head",
            bias="",
            activation="gelu",
        ),
    ),
    tiny={
        **BERT.tiny,
        "model_type": "electra",
        "architectures": ["ElectraModel"],
        "vocab_size": 65,
        "embedding_size": 24,
        "num_attention_heads": 5,
        "max_position_embeddings": 27,
        "hidden_act": "gelu_new",
        "pad_token_id": 9,
    },
    note="absolute positions; embeds are embedding_size wide",
)
