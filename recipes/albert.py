"""ALBERT (Lan et al., 2019, https://arxiv.org/abs/1909.11942); reference: transformers' AlbertModel."""

from dataclasses import replace

from toolkit.config import ConfigReader
from toolkit.heads import mlm_head, sequence_head, token_head
from toolkit.recipe import Recipe
from toolkit.spec import EncoderSpec
from toolkit.weights import drop, fuse, rename

from .bert import RECIPE as BERT
from .bert import spec as bert_spec

LAYER = "encoder.albert_layer_groups.{i}.albert_layers.{j}."
BLOCK = "blocks.{i}_{j}."


def spec(config: ConfigReader) -> EncoderSpec:
    """BERT's, with narrow embeddings and shared layers; defaults are AlbertConfig's.

    Each depth runs all inner layers of one group; the block of layer j in group i is called "i_j".
    """
    # Fields of the original code for other networks, which the reference does not read.
    config.neutral(down_scale_factor=1, gap_size=0, net_structure_type=0, num_memory_blocks=0, layers_to_keep=[])
    base = bert_spec(config, vocab_size=30000, hidden_size=4096, heads=64, inner=16384, activation="gelu_new")
    depths = len(base.blocks)
    groups = config.integer("num_hidden_groups", 1, maximum=100)
    inner = config.integer("inner_group_num", 1, maximum=100)
    width = config.integer("embedding_size", 128)
    # In floating point, as in the reference: whole numbers would choose another group for 18 layers in 14 groups.
    chosen = [int(depth / (depths / groups)) for depth in range(depths)]
    return replace(
        base,
        embedding=replace(base.embedding, width=width, projection="after_norm"),
        blocks=tuple(replace(base.blocks[0], name=f"{i}_{j}") for i in range(groups) for j in range(inner)),
        schedule=tuple(f"{i}_{j}" for i in chosen for j in range(inner)),
    )


RECIPE = Recipe(
    model_type="albert",
    classes=("AlbertModel", "AlbertForMaskedLM", "AlbertForPreTraining"),
    tasks=("embed",),
    spec=spec,
    prefixes=("albert.",),
    aliases=BERT.aliases,
    rules=(
        *(rule for rule in BERT.rules if rule.sources[0].startswith("embeddings.")),
        rename("embeddings.projection.{p}", "encoder.embedding_hidden_mapping_in.{p}"),
        fuse(
            BLOCK + "attention.qkv.{p}",
            LAYER + "attention.query.{p}",
            LAYER + "attention.key.{p}",
            LAYER + "attention.value.{p}",
        ),
        rename(BLOCK + "attention.out.{p}", LAYER + "attention.dense.{p}"),
        rename(BLOCK + "attention_norm.{p}", LAYER + "attention.LayerNorm.{p}"),
        rename(BLOCK + "mlp.up.{p}", LAYER + "ffn.{p}"),
        rename(BLOCK + "mlp.down.{p}", LAYER + "ffn_output.{p}"),
        rename(BLOCK + "mlp_norm.{p}", LAYER + "full_layer_layer_norm.{p}"),
        drop("pooler.{p}", why="the vectors are pooled from token states, not by ALBERT's pooler"),
        drop("predictions.{*}", why="the masked language model's head does not take part in embeddings", outside=True),
        drop("sop_classifier.{*}", why="the pre-training heads do not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    heads=(
        sequence_head("AlbertForSequenceClassification", "tanh", "pooler", dense_inside=True),
        token_head("AlbertForTokenClassification"),
        mlm_head(
            "AlbertForMaskedLM",
            dense="predictions.dense",
            norm="predictions.LayerNorm",
            decoder="predictions.decoder",
            bias="predictions.bias",
        ),
    ),
    # Dropout is off at inference; pad tokens never reach a packed batch, and positions ignore them.
    irrelevant=frozenset(
        "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout_prob pad_token_id".split()
    ),
    tiny={
        **BERT.tiny,
        "model_type": "albert",
        "architectures": ["AlbertModel"],
        "vocab_size": 66,
        "embedding_size": 24,
        "num_hidden_layers": 5,
        "num_hidden_groups": 2,
        "inner_group_num": 2,
        "max_position_embeddings": 29,
        "hidden_act": "gelu",
        "pad_token_id": 8,
    },
    note="absolute positions; layers share weights by group; embeds are embedding_size wide",
)
