"""DeBERTa v2 and v3 (He et al., 2021, https://arxiv.org/abs/2006.03654); reference: transformers' DebertaV2Model."""

from dataclasses import replace

import torch

from toolkit.errors import UnsupportedError
from toolkit.heads import either_head, mlm_head, sequence_head, token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import AttentionSpec, DisentangledSpec, EncoderSpec, stack
from toolkit.weights import drop, fuse, rename

from .bert import LAYER
from .bert import RECIPE as BERT
from .bert import spec as bert_spec

SELF = LAYER + "attention.self."


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are DebertaV2Config's."""
    config.neutral(conv_kernel_size=0)
    base = bert_spec(
        config, vocab_size=128100, hidden_size=1536, heads=24, inner=6144, layers=24, eps=1e-7, segments=None
    )
    block = replace(base.blocks[0], attention=attention(config, base))
    width = config.integer("embedding_size", base.hidden)
    embedding = replace(
        base.embedding,
        width=width,
        positions=base.usable_length if config.boolean("position_biased_input", True) else 0,
        segments=config.integer("type_vocab_size", 0, minimum=0),
        projection="before_norm" if width != base.hidden else "none",
        projection_bias=False,
    )
    return replace(base, blocks=stack(len(base.blocks), block), embedding=embedding)


def attention(config: ConfigReader, base: EncoderSpec) -> AttentionSpec:
    """BERT's, with the terms for distances; they count in the scale even where relative attention is off."""
    plain = base.blocks[0].attention
    size = config.head_dim(base.hidden, plain.heads, "attention_head_size")
    if size != plain.head_dim:
        raise UnsupportedError(f"config.json: attention_head_size = {size} is not supported, only {plain.head_dim} is")
    terms = config.terms("pos_att_type", ("c2p", "p2c"))
    farthest = config.integer("max_relative_positions", -1, minimum=-(2**31))
    farthest = base.usable_length if farthest < 1 else farthest
    buckets = max(config.integer("position_buckets", -1, minimum=-(2**31)), 0)
    if buckets and not 0 < buckets // 2 < farthest - 1:  # the reference would divide by the logarithm of 1 or by 0
        raise UnsupportedError(f"config.json: position_buckets = {buckets} is not supported for {farthest} distances")
    distance = DisentangledSpec(
        span=buckets or farthest,
        buckets=buckets,
        max_distance=farthest,
        c2p="c2p" in terms,
        p2c="p2c" in terms,
        shared=config.boolean("share_att_key", False),
        norm=base.embedding.norm if "layer_norm" in config.terms("norm_rel_ebd", ("layer_norm", "none")) else None,
    )
    # the reference takes the root in float32, whatever the dtype of its weights
    scale = 1 / float(torch.tensor(float(size * (1 + len(terms)))).sqrt())
    relative = config.boolean("relative_attention", False) and len(terms) > 0
    return replace(plain, scale=scale, distance=distance if relative else None)


NO_TERM = "relative_attention and pos_att_type ask for no term that uses the distances"
LEFTOVERS = ("word_embeddings._weight", "position_embeddings._weight", "position_ids")  # of training; a buffer
HEADS = ("cls", "lm_predictions", "mask_predictions", "pooler", "classifier", "qa_outputs")
MLM, NEWER = "DebertaV2ForMaskedLM", "lm_predictions.lm_head"
OTHERS = {"embeddings.position.weight", "blocks.{i}.attention.qkv.{p}"}

RECIPE = Recipe(
    model_type="deberta-v2",
    classes=("DebertaV2Model", "DebertaV2ForMaskedLM"),
    tasks=("embed",),
    spec=spec,
    prefixes=("deberta.",),
    aliases=BERT.aliases,
    rules=(
        *(rule for rule in BERT.rules if rule.target is not None and rule.target not in OTHERS),
        # checkpoints of v3 store the table of positions although the model does not add it
        rename("embeddings.position.weight", "embeddings.position_embeddings.weight", unused="positions are not added"),
        rename("embeddings.projection.weight", "embeddings.embed_proj.weight"),
        fuse("blocks.{i}.attention.qkv.{p}", SELF + "query_proj.{p}", SELF + "key_proj.{p}", SELF + "value_proj.{p}"),
        rename("blocks.{i}.attention.distance_key.{p}", SELF + "pos_key_proj.{p}"),
        rename("blocks.{i}.attention.distance_query.{p}", SELF + "pos_query_proj.{p}"),
        rename("distance.weight", "encoder.rel_embeddings.weight", unused=NO_TERM),
        rename("distance.norm.{p}", "encoder.LayerNorm.{p}", unused=NO_TERM),
        *(drop(f"embeddings.{name}", why="not a parameter of the reference, but left over") for name in LEFTOVERS),
        *(drop(f"{head}.{{*}}", why="a head takes no part in embeddings", outside=True) for head in HEADS),
    ),
    heads=(
        sequence_head("DebertaV2ForSequenceClassification", "pooler_hidden_act", "pooler.dense"),
        token_head("DebertaV2ForTokenClassification"),
        either_head(
            "legacy",
            True,
            mlm_head(MLM),
            mlm_head(MLM, dense=f"{NEWER}.dense", norm=f"{NEWER}.LayerNorm", decoder=NEWER, bias="", unties=False),
        ),
    ),
    # Dropout is off at inference, padding never reaches a packed batch, the pooler is dropped, `legacy` chooses a head.
    # Without a kernel (see `spec`) the convolution has no groups either.
    irrelevant=frozenset(
        """
        hidden_dropout_prob attention_probs_dropout_prob pad_token_id padding_idx pooler_dropout pooler_hidden_act
        pooler_hidden_size legacy conv_act conv_groups
        """.split()
    ),
    tiny={**BERT.tiny, "model_type": "deberta-v2", "architectures": ["DebertaV2Model"], "embedding_size": 24}
    | {"max_position_embeddings": 60, "max_relative_positions": 40, "norm_rel_ebd": "layer_norm"}
    | {"pos_att_type": "p2c|c2p", "position_biased_input": False, "position_buckets": 8, "relative_attention": True},
    note="relative positions by content; no convolution (conv_kernel_size)",
)
