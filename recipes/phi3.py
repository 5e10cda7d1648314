"""Phi-3 (Abdin et al., 2024, https://arxiv.org/abs/2404.14219); reference: transformers' Phi3Model."""

from dataclasses import replace

from toolkit.decoders import LAYER, decoder_spec, sliding_everywhere
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import EncoderSpec, RopeSpec
from toolkit.weights import rename

from .llama import RECIPE as LLAMA

SPLIT = ("blocks.{i}.attention.qkv.{p}", "blocks.{i}.mlp.up.{p}")


def rope(config: ConfigReader, size: int) -> RopeSpec:
    """Over a part of each head; the only other type that the reference has, longrope, is refused."""
    return config.rope(size, 10_000.0, only=("default",), partial=True)


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Phi3Config's."""
    base = decoder_spec(
        config, hidden_size=3072, width=8192, kv_heads=None, length=4096, words=32_064, eps=1e-5, rope=rope
    )
    return sliding_everywhere(config, base, default=None)


RECIPE = replace(
    LLAMA,
    model_type="phi3",
    classes=("Phi3Model",),
    spec=spec,
    rules=(
        *(rule for rule in LLAMA.rules if rule.target not in SPLIT),
        rename("blocks.{i}.attention.qkv.{p}", LAYER + "self_attn.qkv_proj.{p}"),
        rename("blocks.{i}.mlp.up.{p}", LAYER + "mlp.gate_up_proj.{p}"),
    ),
    heads=(causal_head("Phi3ForCausalLM"), last_token_head("Phi3ForSequenceClassification", pad=32_000)),
    # Dropout is off; pad tokens are ordinary rows of the table; only longrope reads the original length.
    irrelevant=frozenset(
        "attention_dropout embd_pdrop original_max_position_embeddings pad_token_id resid_pdrop".split()
    ),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if not name.endswith("_bias")},
        "model_type": "phi3",
        "architectures": ["Phi3Model"],
        "partial_rotary_factor": 0.85,
        "sliding_window": 6,
    },
)
