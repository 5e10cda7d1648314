"""Qwen2 (Yang et al., 2024, https://arxiv.org/abs/2407.10671) (as an encoder gte-Qwen2: `is_causal` false).

Reference: transformers' Qwen2Model.
"""

from dataclasses import replace

from toolkit.decoders import by_layer_types, decoder_spec, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import EncoderSpec

from .llama import RECIPE as LLAMA


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Qwen2Config's. Queries, keys and values always have a bias."""
    base = decoder_spec(config, width=22016, kv_heads=32, length=32_768, words=151_936)
    biased = with_blocks(base, lambda k, block: replace(block, attention=replace(block.attention, bias=True)))
    return by_layer_types(config, biased)


RECIPE = replace(
    LLAMA,
    model_type="qwen2",
    classes=("Qwen2Model",),
    spec=spec,
    heads=(causal_head("Qwen2ForCausalLM"), last_token_head("Qwen2ForSequenceClassification")),
    irrelevant=frozenset("attention_dropout pad_token_id".split()),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if not name.endswith("_bias")},
        "model_type": "qwen2",
        "architectures": ["Qwen2Model"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
)
