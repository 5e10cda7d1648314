"""Mixtral (Jiang et al., 2024, https://arxiv.org/abs/2401.04088); reference: transformers' MixtralModel."""

from dataclasses import replace

from toolkit.decoders import decoder_spec, expert_rules, read_experts, sliding_everywhere, whole_heads, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import EncoderSpec

from .llama import RECIPE as LLAMA


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are MixtralConfig's. Every layer has experts."""
    config.neutral(layer_types=None)  # windows are in all layers or in none
    base = decoder_spec(
        config,
        width=14_336,
        kv_heads=8,
        length=131_072,
        words=32_000,
        eps=1e-5,
        rope=lambda config, size: whole_heads(config, size, 1e6),
    )
    experts = read_experts(config, ("num_local_experts", "num_experts"), count=8, chosen=2, normalise=True)
    mixture = with_blocks(base, lambda k, block: replace(block, mlp=replace(block.mlp, experts=experts)))
    return sliding_everywhere(config, mixture, default=None)


RECIPE = replace(
    LLAMA,
    model_type="mixtral",
    classes=("MixtralModel",),
    spec=spec,
    aliases={"block_sparse_moe": "mlp"},
    rules=(*LLAMA.rules, *expert_rules("w1", "w3", "w2")),
    heads=(causal_head("MixtralForCausalLM"), last_token_head("MixtralForSequenceClassification")),
    # Dropout is off; pad tokens are ordinary rows of the table; what is said of the router is for its training.
    irrelevant=frozenset(
        "attention_dropout output_router_logits pad_token_id router_aux_loss_coef router_jitter_noise".split()
    ),
    tiny={
        **{name: value for name, value in LLAMA.tiny.items() if not name.endswith("_bias")},
        "model_type": "mixtral",
        "architectures": ["MixtralModel"],
        "intermediate_size": 24,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
    },
)
