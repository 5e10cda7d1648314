"""SmolLM3 (https://huggingface.co/blog/smollm3); reference: transformers' SmolLM3Model."""

from dataclasses import replace

from toolkit.decoders import by_layer_types, decoder_spec, whole_heads, with_biases, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import EncoderSpec

from .llama import RECIPE as LLAMA


def has_rope(config: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Which layers rotate: by `no_rope_layers`, which has a one for each of them, else all but every fourth."""
    every = config.integer("no_rope_layer_interval", 4)
    stated = config.flags("no_rope_layers", layers)
    return stated or tuple((k + 1) % every != 0 for k in range(layers))


def without_rope(config: ConfigReader, spec: EncoderSpec) -> list[bool]:
    """Which layers have a window, where no `layer_types` say it: those that do not rotate."""
    return [attention.rope is None for attention in spec.attentions]


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are SmolLM3Config's."""
    base = decoder_spec(
        config,
        hidden_size=2048,
        width=11008,
        layers=36,
        attention_heads=16,
        kv_heads=4,
        length=32_768,
        words=128_256,
        rope=lambda config, size: whole_heads(config, size, 2e6),
    )
    rotates = has_rope(config, len(base.blocks))
    some = with_blocks(
        with_biases(config, base),
        lambda k, b: b if rotates[k] else replace(b, attention=replace(b.attention, rope=None)),
    )
    return by_layer_types(config, some, slides=without_rope, default=None)


RECIPE = replace(
    LLAMA,
    model_type="smollm3",
    classes=("SmolLM3Model",),
    spec=spec,
    heads=(
        causal_head("SmolLM3ForCausalLM", tied=True),
        last_token_head("SmolLM3ForSequenceClassification", pad=128_004),
    ),
    irrelevant=frozenset("attention_dropout pad_token_id".split()),
    tiny={
        **LLAMA.tiny,
        "model_type": "smollm3",
        "architectures": ["SmolLM3Model"],
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
    },
)
