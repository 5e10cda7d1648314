"""OLMo 2 (OLMo et al., 2024, https://arxiv.org/abs/2501.00656); reference: transformers' Olmo2Model."""

from dataclasses import replace

from toolkit.decoders import LAYER, decoder_spec, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import BlockSpec, EncoderSpec
from toolkit.weights import rename

from .llama import RECIPE as LLAMA
from .qwen3 import RECIPE as QWEN3

NORMS_BEFORE = ("blocks.{i}.attention_norm.weight", "blocks.{i}.mlp_norm.weight")


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Olmo2Config's. Queries and keys are normalised, all heads at once."""
    base = decoder_spec(config, width=11008, kv_heads=None, length=2048, words=50_304, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)

    def change(k: int, block: BlockSpec) -> BlockSpec:
        attention = replace(block.attention, bias=bias, out_bias=bias, qk_norm=block.norm, qk_norm_over="all")
        return replace(block, arrangement="post_branch", attention=attention)

    return with_blocks(base, change)


RECIPE = replace(
    LLAMA,
    model_type="olmo2",
    classes=("Olmo2Model",),
    spec=spec,
    rules=(
        *(rule for rule in QWEN3.rules if rule.target not in NORMS_BEFORE),
        rename("blocks.{i}.attention_out_norm.weight", LAYER + "post_attention_layernorm.weight"),
        rename("blocks.{i}.mlp_out_norm.weight", LAYER + "post_feedforward_layernorm.weight"),
    ),
    heads=(causal_head("Olmo2ForCausalLM"), last_token_head("Olmo2ForSequenceClassification", pad=1)),
    irrelevant=frozenset("attention_dropout pad_token_id".split()),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if name != "mlp_bias"},
        "model_type": "olmo2",
        "architectures": ["Olmo2Model"],
    },
)
