"""MPNet (Song et al., 2020, https://arxiv.org/abs/2004.09297); reference: transformers' MPNetModel."""

from dataclasses import replace

from toolkit.config import ConfigReader
from toolkit.errors import CheckpointError
from toolkit.heads import lm_head, sequence_head, token_head
from toolkit.recipe import Recipe
from toolkit.spec import BucketBiasSpec, EncoderSpec
from toolkit.weights import drop, fuse, rename

from .bert import RECIPE as BERT
from .bert import spec as bert_spec

LAYER = "encoder.layer.{i}."
# The reference takes neither of these from the configuration: positions start behind id 1 and skip it, whatever
# pad_token_id says, and distances always fall into 32 buckets.
PAD = 1
BUCKETS = 32


def spec(config: ConfigReader) -> EncoderSpec:
    """BERT's, with T5's bias on the scores, fixed positions and no segments; defaults are MPNetConfig's."""
    config.neutral(relative_attention_num_buckets=BUCKETS)
    base = bert_spec(config, vocab_size=30527, segments=None)
    usable = base.embedding.positions - PAD - 1
    if usable < 1:
        rows = base.embedding.positions
        raise CheckpointError(f"config.json: max_position_embeddings = {rows}, expected at least {PAD + 2}")
    bias = BucketBiasSpec(buckets=BUCKETS, max_distance=128)
    return replace(
        base,
        usable_length=usable,
        embedding=replace(base.embedding, position_start=PAD + 1, position_pad=PAD),
        blocks=tuple(replace(block, attention=replace(block.attention, distance=bias)) for block in base.blocks),
    )


RECIPE = Recipe(
    model_type="mpnet",
    classes=("MPNetModel", "MPNetForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("mpnet.",),
    aliases=BERT.aliases,
    rules=(
        rename("embeddings.token.weight", "embeddings.word_embeddings.weight"),
        rename("embeddings.position.weight", "embeddings.position_embeddings.weight"),
        rename("embeddings.norm.{p}", "embeddings.LayerNorm.{p}"),
        rename("distance.table.weight", "encoder.relative_attention_bias.weight"),
        fuse(
            "blocks.{i}.attention.qkv.{p}",
            LAYER + "attention.attn.q.{p}",
            LAYER + "attention.attn.k.{p}",
            LAYER + "attention.attn.v.{p}",
        ),
        rename("blocks.{i}.attention.out.{p}", LAYER + "attention.attn.o.{p}"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "attention.LayerNorm.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "intermediate.dense.{p}"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "output.dense.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "output.LayerNorm.{p}"),
        drop("embeddings.position_ids", why="a buffer of consecutive numbers, not a parameter"),
        drop("pooler.dense.{p}", why="the vectors are pooled from token states, not by MPNet's pooler"),
        drop("lm_head.{*}", why="the masked language model's head does not take part in embeddings", outside=True),
        drop("classifier.{*}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    heads=(
        sequence_head("MPNetForSequenceClassification", "tanh", "classifier.dense", "classifier.out_proj"),
        token_head("MPNetForTokenClassification"),
        lm_head("MPNetForMaskedLM"),
    ),
    # Dropout is off at inference; pad tokens never reach a packed batch, and positions do not follow pad_token_id.
    irrelevant=frozenset("hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pad_token_id".split()),
    tiny={
        "model_type": "mpnet",
        "architectures": ["MPNetModel"],
        "vocab_size": 67,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "intermediate_size": 56,
        "max_position_embeddings": 33,
        "relative_attention_num_buckets": 32,
        "layer_norm_eps": 1e-3,
        "pad_token_id": 4,
        "hidden_act": "gelu",
    },
    note="positions start at 2 and skip token id 1; one bias by distance for all layers; no segments",
)
