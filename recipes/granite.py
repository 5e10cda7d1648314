"""Granite (IBM, 2024, https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers.

Reference: transformers' GraniteModel.
"""

from dataclasses import replace

from toolkit.decoders import with_blocks
from toolkit.heads import causal_head
from toolkit.recipe import ConfigReader
from toolkit.spec import BlockSpec, EncoderSpec
from toolkit.steps import DivideStep, Step

from .llama import RECIPE as LLAMA


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are GraniteConfig's. Caller-supplied embeddings are multiplied too."""
    base = LLAMA.spec(config)
    scale = config.positive("attention_multiplier", 1.0)
    residual = config.positive("residual_multiplier", 1.0)

    def change(k: int, block: BlockSpec) -> BlockSpec:
        return replace(block, attention=replace(block.attention, scale=scale), residual_scale=residual)

    multiplier = config.positive("embedding_multiplier", 1.0)
    return with_blocks(replace(base, embedding=replace(base.embedding, seam_scale=multiplier)), change)


def scaled_logits(config: ConfigReader) -> tuple[Step, ...]:
    """Logits are divided by `logits_scaling`."""
    return (DivideStep(on="tokens", by=config.positive("logits_scaling", 1.0)),)


RECIPE = replace(
    LLAMA,
    model_type="granite",
    classes=("GraniteModel",),
    spec=spec,
    heads=(causal_head("GraniteForCausalLM", after=scaled_logits),),
    # The head reads logits_scaling; token states do not depend on it.
    irrelevant=frozenset("attention_dropout logits_scaling pad_token_id".split()),
    tiny={
        **LLAMA.tiny,
        "model_type": "granite",
        "architectures": ["GraniteModel"],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.5,
    },
)
