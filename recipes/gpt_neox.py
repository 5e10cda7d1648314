"""GPT-NeoX (Black et al., 2022, https://arxiv.org/abs/2204.06745), Pythia; reference: transformers' GPTNeoXModel."""

from dataclasses import replace

from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import BlockSpec, EmbeddingSpec, EncoderSpec, MlpSpec, NormSpec, self_attention, stack
from toolkit.weights import drop, rename

LAYER = "layers.{i}."
MORE = ("llama3", "yarn")
COMPUTED = "rotary frequencies are computed from config.json"


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are GPTNeoXConfig's."""
    hidden, heads = config.integer("hidden_size", 6144), config.integer("num_attention_heads", 64)
    head_dim = config.head_dim(hidden, heads)
    norm = NormSpec(eps=config.positive("layer_norm_eps", 1e-5))
    rope = config.rope(head_dim, 10_000.0, "rotary_emb_base", more=MORE, partial=True, share=("rotary_pct", 0.25))
    attention = self_attention(heads, head_dim, bias=config.boolean("attention_bias", default=True), rope=rope)
    block = BlockSpec(
        arrangement="parallel" if config.boolean("use_parallel_residual", default=True) else "pre",
        attention=replace(attention, causal=config.boolean("is_causal", default=True)),
        mlp=MlpSpec(
            width=config.integer("intermediate_size", 24576),
            activation=config.activation("hidden_act", "gelu"),
            bias=True,
            out_bias=True,
        ),
        norm=norm,
    )
    blocks = stack(config.integer("num_hidden_layers", 44, maximum=10_000), block)
    return EncoderSpec(
        hidden=hidden,
        blocks=blocks,
        schedule=tuple(block.name for block in blocks),
        usable_length=config.integer("max_position_embeddings", 2048),
        embedding=EmbeddingSpec(vocab_size=config.integer("vocab_size", 50432), width=hidden, norm=None),
        final_norm=norm,
    )


RECIPE = Recipe(
    model_type="gpt_neox",
    classes=("GPTNeoXModel",),
    tasks=("embed",),
    spec=spec,
    prefixes=("gpt_neox.",),
    aliases={},
    rules=(
        rename("embeddings.token.weight", "embed_in.weight"),
        rename("blocks.{i}.attention_norm.{p}", LAYER + "input_layernorm.{p}"),
        rename("blocks.{i}.attention.qkv.{p}", LAYER + "attention.query_key_value.{p}", layout="by_head"),
        rename("blocks.{i}.attention.out.{p}", LAYER + "attention.dense.{p}"),
        rename("blocks.{i}.mlp_norm.{p}", LAYER + "post_attention_layernorm.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "mlp.dense_h_to_4h.{p}"),
        rename("blocks.{i}.mlp.down.{p}", LAYER + "mlp.dense_4h_to_h.{p}"),
        rename("final_norm.{p}", "final_layer_norm.{p}"),
        drop(LAYER + "attention.bias", why="a buffer with the causal mask, not a parameter"),
        drop(LAYER + "attention.masked_bias", why="a buffer with the value of masked scores, not a parameter"),
        drop(LAYER + "attention.rotary_emb.inv_freq", why=COMPUTED),
        drop("rotary_emb.inv_freq", why=COMPUTED),
        drop("embed_out.weight", why="the language model's head does not take part in embeddings", outside=True),
        drop("lm_head.weight", why="the language model's head does not take part in embeddings", outside=True),
        drop("score.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("classifier.{p}", why="a classification head does not take part in embeddings", outside=True),
        drop("qa_outputs.{p}", why="a question answering head does not take part in embeddings", outside=True),
    ),
    # Dropout is off; pad tokens are ordinary rows of the table.
    irrelevant=frozenset("attention_dropout hidden_dropout classifier_dropout pad_token_id".split()),
    neutral={"is_decoder": (False, True)},  # the reference's documentation sets it, nothing reads it
    heads=(
        causal_head("GPTNeoXForCausalLM", stored=("embed_out", "lm_head")),
        last_token_head("GPTNeoXForSequenceClassification"),
    ),
    tiny={
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXModel"],
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "intermediate_size": 56,
        "max_position_embeddings": 26,
        "layer_norm_eps": 1e-3,
        "rotary_emb_base": 300,
        "rotary_pct": 0.5,
        "pad_token_id": 7,
    },
    note="a causal decoder",
)
