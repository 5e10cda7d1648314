"""T5's encoder (Raffel et al., 2019, https://arxiv.org/abs/1910.10683); reference: transformers' T5EncoderModel."""

from collections.abc import Mapping
from typing import Literal

from toolkit.config import ConfigReader
from toolkit.recipe import Recipe
from toolkit.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    BucketBiasSpec,
    EmbeddingSpec,
    EncoderSpec,
    MlpSpec,
    NormSpec,
    stack,
)
from toolkit.weights import copy, drop, fuse, rename

ATTENTION, MLP = "encoder.block.{i}.layer.0.", "encoder.block.{i}.layer.1."
# feed_forward_proj → activation, its transformers name, gate. "gated-gelu" means the approximation, "gelu" does not.
FEED_FORWARD: Mapping[str, tuple[Activation, str, Literal["none", "first"]]] = {
    "relu": ("relu", "relu", "none"),
    "gelu": ("gelu", "gelu", "none"),
    "gelu_new": ("gelu_tanh", "gelu_new", "none"),
    "silu": ("silu", "silu", "none"),
    "gated-relu": ("relu", "relu", "first"),
    "gated-gelu": ("gelu_tanh", "gelu_new", "first"),
    "gated-silu": ("silu", "silu", "first"),
}
TINY = {
    "model_type": "t5", "architectures": ["T5EncoderModel"], "vocab_size": 69, "d_model": 40, "d_kv": 12, "d_ff": 56,
    "num_layers": 3, "num_heads": 3, "relative_attention_num_buckets": 10, "relative_attention_max_distance": 19,
    "layer_norm_epsilon": 1e-3, "feed_forward_proj": "gated-gelu", "n_positions": 34, "pad_token_id": 5,
    "is_encoder_decoder": True,
}  # fmt: skip


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are T5Config's."""
    hidden = config.integer(("d_model", "hidden_size"), 512)
    heads = config.integer(("num_heads", "num_attention_heads"), 8)
    # Below 4 buckets none is left for logarithmic distances, and the reference divides by zero.
    buckets = config.integer("relative_attention_num_buckets", 32, minimum=4)
    activation, name, gate = FEED_FORWARD[config.choice("feed_forward_proj", "relu", tuple(FEED_FORWARD))]
    # Stored by transformers, and obeyed by it, though they follow from feed_forward_proj.
    config.neutral(dense_act_fn=name, is_gated_act=gate != "none")
    norm = NormSpec(eps=config.positive("layer_norm_epsilon", 1e-6), kind="rms", bias=False)
    block = BlockSpec(
        arrangement="pre",
        attention=AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=config.integer(("d_kv", "head_dim"), 64),
            scale=1.0,
            causal=False,
            bias=False,
            out_bias=False,
            distance=BucketBiasSpec(
                buckets=buckets,
                max_distance=config.integer("relative_attention_max_distance", 128, minimum=buckets // 4 + 1),
            ),
        ),
        mlp=MlpSpec(width=config.integer("d_ff", 2048), activation=activation, bias=False, out_bias=False, gate=gate),
        norm=norm,
    )
    blocks = stack(config.integer(("num_layers", "num_hidden_layers"), 6, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        # There is no position table. Original checkpoints name the length that they were trained with.
        usable_length=config.integer("n_positions", 512, maximum=2**20),
        embedding=EmbeddingSpec(vocab_size=config.integer("vocab_size", 32128), width=hidden, norm=None),
        final_norm=norm,
    )


RECIPE = Recipe(
    model_type="t5",
    classes=("T5EncoderModel", "T5Model", "T5ForConditionalGeneration", "T5WithLMHeadModel"),
    tasks=("embed",),
    spec=spec,
    prefixes=("transformer.",),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "shared.weight"),
        copy("embeddings.token.weight", "encoder.embed_tokens.weight"),
        rename("distance.table.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        rename("blocks.{i}.attention_norm.weight", ATTENTION + "layer_norm.weight"),
        fuse("blocks.{i}.attention.qkv.weight", *(f"{ATTENTION}SelfAttention.{name}.weight" for name in "qkv")),
        rename("blocks.{i}.attention.out.weight", ATTENTION + "SelfAttention.o.weight"),
        rename("blocks.{i}.mlp_norm.weight", MLP + "layer_norm.weight"),
        fuse("blocks.{i}.mlp.up.weight", *(f"{MLP}DenseReluDense.wi_{k}.weight" for k in (0, 1))),
        rename("blocks.{i}.mlp.up.weight", MLP + "DenseReluDense.wi.weight"),
        rename("blocks.{i}.mlp.down.weight", MLP + "DenseReluDense.wo.weight"),
        rename("final_norm.weight", "encoder.final_layer_norm.weight"),
        drop("decoder.{*}", why="the decoder does not take part in embeddings"),
        drop("lm_head.weight", why="the language model's head does not take part in embeddings", outside=True),
        drop("classification_head.{*}", why="a classification head does not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    # Dropout is off at inference; pad tokens never reach a packed batch; the rest is the decoder's and training's.
    irrelevant=frozenset(
        """
        dropout_rate classifier_dropout pad_token_id num_decoder_layers decoder_start_token_id scale_decoder_outputs
        initializer_factor
        """.split()
    ),
    reference="T5EncoderModel",
    neutral={"is_encoder_decoder": (True, False)},
    tiny=TINY,
    note="the encoder alone; scores are not scaled; usable length is n_positions, or 512",
)
