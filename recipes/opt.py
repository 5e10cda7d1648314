"""OPT (Zhang et al., 2022, https://arxiv.org/abs/2205.01068); reference: transformers' OPTModel."""

from dataclasses import replace

from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, fuse, rename

LAYER = "decoder.layers.{i}."
OFFSET = 2  # rows of the position table that nothing uses


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are OPTConfig's. The token states are as wide as the token table."""
    config.neutral(layer_norm_elementwise_affine=True)
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    head_dim = config.head_dim(hidden, heads)
    bias, before = config.boolean("enable_bias", default=True), config.boolean("do_layer_norm_before", default=True)
    removed = config.boolean("_remove_final_layer_norm", default=False)
    width = config.optional_integer("word_embed_proj_dim") or hidden
    length = config.integer("max_position_embeddings", 2048)
    norm = NormSpec(eps=1e-5)  # LayerNorm's own default: no field says it
    block = BlockSpec(
        arrangement="pre" if before else "post",
        attention=replace(self_attention(heads, head_dim, bias=bias), causal=config.boolean("is_causal", default=True)),
        mlp=MlpSpec(
            width=config.integer("ffn_dim", 3072),
            activation=config.activation("activation_function", "relu"),
            bias=bias,
            out_bias=bias,
        ),
        norm=norm,
    )
    blocks = stack(config.integer("num_hidden_layers", 12, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=length,
        embedding=EmbeddingSpec(
            vocab_size=config.integer("vocab_size", 50272),
            width=width,
            positions=length + OFFSET,
            position_start=OFFSET,
            norm=None,
            projection="before_sum" if width != hidden else "none",
            projection_bias=False,
        ),
        final_norm=norm if before and not removed else None,
        projected=width if width != hidden else 0,
    )


RECIPE = Recipe(
    model_type="opt",
    positions_by_mask=True,
    classes=("OPTModel",),
    tasks=("embed",),
    spec=spec,
    prefixes=("model.",),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "decoder.embed_tokens.weight"),
        rename("embeddings.position.weight", "decoder.embed_positions.weight"),
        rename("embeddings.projection.weight", "decoder.project_in.weight"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "self_attn_layer_norm.{p}"),
        fuse("blocks.{i}.attention.qkv.{p}", *(f"{LAYER}self_attn.{name}_proj.{{p}}" for name in "qkv")),
        rename("blocks.{i}.attention.out.{p}", LAYER + "self_attn.out_proj.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "final_layer_norm.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "fc1.{p}"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "fc2.{p}"),
        rename("final_norm.{p}", "decoder.final_layer_norm.{p}"),
        rename("projection.weight", "decoder.project_out.weight"),
        drop("lm_head.weight", why="the language model's head does not take part in embeddings", outside=True),
        drop("score.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    # Dropout is off; pad tokens are ordinary rows of the table; the tokenizer's files say what precedes a text.
    irrelevant=frozenset("dropout attention_dropout activation_dropout layerdrop init_std pad_token_id prefix".split()),
    heads=(causal_head("OPTForCausalLM", tied=True), last_token_head("OPTForSequenceClassification", pad=1)),
    tiny={
        "model_type": "opt",
        "architectures": ["OPTModel"],
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "ffn_dim": 56,
        "max_position_embeddings": 26,
        "word_embed_proj_dim": 24,
        "activation_function": "gelu",
        "pad_token_id": 7,
    },
    note="a causal decoder with learned positions",
)
