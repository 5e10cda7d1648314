"""Qwen3 (Yang et al., 2025, https://arxiv.org/abs/2505.09388) (as an encoder Qwen3-Embedding).

Reference: transformers' Qwen3Model.
"""

from dataclasses import replace

from toolkit.decoders import LAYER, by_layer_types, decoder_spec, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import BlockSpec, EncoderSpec
from toolkit.weights import rename

from .llama import RECIPE as LLAMA


def with_qk_norm(config: ConfigReader, spec: EncoderSpec) -> EncoderSpec:
    """The same with queries and keys normalised, each head alone, and the biases that `attention_bias` says."""
    bias = config.boolean("attention_bias", default=False)

    def change(k: int, block: BlockSpec) -> BlockSpec:
        return replace(block, attention=replace(block.attention, bias=bias, out_bias=bias, qk_norm=block.norm))

    return with_blocks(spec, change)


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Qwen3Config's."""
    base = decoder_spec(config, width=22016, kv_heads=32, length=32_768, words=151_936, head_dim=128)
    return by_layer_types(config, with_qk_norm(config, base))


RECIPE = replace(
    LLAMA,
    model_type="qwen3",
    classes=("Qwen3Model",),
    spec=spec,
    rules=(
        *LLAMA.rules,
        rename("blocks.{i}.attention.q_norm.weight", LAYER + "self_attn.q_norm.weight"),
        rename("blocks.{i}.attention.k_norm.weight", LAYER + "self_attn.k_norm.weight"),
    ),
    heads=(causal_head("Qwen3ForCausalLM"), last_token_head("Qwen3ForSequenceClassification")),
    irrelevant=frozenset("attention_dropout pad_token_id".split()),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if name != "mlp_bias"},
        "model_type": "qwen3",
        "architectures": ["Qwen3Model"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
)
