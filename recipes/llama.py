"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971); reference: transformers' LlamaModel."""

from toolkit.decoders import LAYER_RULES, decoder_spec, with_biases
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader, Recipe
from toolkit.spec import EncoderSpec
from toolkit.weights import drop


def llama_spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are LlamaConfig's."""
    return with_biases(config, decoder_spec(config, width=11008, kv_heads=None, length=2048, words=32000))


RECIPE = Recipe(
    model_type="llama",
    classes=("LlamaModel",),
    tasks=("embed",),
    spec=llama_spec,
    prefixes=("model.",),
    aliases={},
    rules=(
        *LAYER_RULES,
        drop("lm_head.weight", why="the language model's head does not take part in embeddings", outside=True),
        drop("score.{p}", why="a classification head does not take part in embeddings", outside=True),
    ),
    # Dropout is off; pad tokens are ordinary rows of the table; the reference does not read pretraining_tp.
    irrelevant=frozenset("attention_dropout pad_token_id pretraining_tp".split()),
    heads=(causal_head("LlamaForCausalLM"), last_token_head("LlamaForSequenceClassification")),
    tiny={
        "model_type": "llama",
        "architectures": ["LlamaModel"],
        "vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 36,
        "max_position_embeddings": 26,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 300.0,
        "pad_token_id": 7,
    },
    note="a causal decoder",
)
