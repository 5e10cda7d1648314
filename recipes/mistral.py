"""Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825); reference: transformers' MistralModel."""

from dataclasses import replace

from toolkit.decoders import decoder_spec, sliding_everywhere
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import EncoderSpec

from .llama import RECIPE as LLAMA


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are MistralConfig's."""
    config.neutral(layer_types=None)  # the mark of Ministral, whose windows are in some layers only
    base = decoder_spec(config, width=14_336, kv_heads=8, length=131_072, words=32_000)
    return sliding_everywhere(config, base, default=4096)


RECIPE = replace(
    LLAMA,
    model_type="mistral",
    classes=("MistralModel",),
    tasks=(),
    spec=spec,
    heads=(causal_head("MistralForCausalLM"), last_token_head("MistralForSequenceClassification")),
    irrelevant=frozenset("attention_dropout pad_token_id".split()),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if not name.endswith("_bias")},
        "model_type": "mistral",
        "architectures": ["MistralModel"],
        "sliding_window": 6,
    },
    note="a causal decoder; no embeddings: as an embedding model it misses the float32 gate by 4 %",
)
