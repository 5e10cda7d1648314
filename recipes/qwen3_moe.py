"""Qwen3's mixtures of experts (Yang et al., 2025, https://arxiv.org/abs/2505.09388).

Reference: transformers' Qwen3MoeModel.
"""

from dataclasses import replace

from toolkit.decoders import decoder_spec, expert_rules, read_experts, sliding_everywhere, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import BlockSpec, EncoderSpec

from .qwen3 import RECIPE as QWEN3
from .qwen3 import with_qk_norm


def with_experts(config: ConfigReader, spec: EncoderSpec) -> EncoderSpec:
    """The same with experts in every `decoder_sparse_step`-th layer, but for those that `mlp_only_layers` names."""
    width, every = config.integer("moe_intermediate_size", 768), config.integer("decoder_sparse_step", 1)
    normalise, dense = config.boolean("norm_topk_prob", default=False), config.integers("mlp_only_layers")
    # transformers writes the second name
    names = ("num_experts", "num_local_experts")
    experts = read_experts(config, names, count=128, chosen=8, normalise=normalise)

    def change(k: int, block: BlockSpec) -> BlockSpec:
        sparse = (k + 1) % every == 0 and k not in dense
        return replace(block, mlp=replace(block.mlp, width=width, experts=experts)) if sparse else block

    return with_blocks(spec, change)


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Qwen3MoeConfig's."""
    config.neutral(layer_types=None)  # windows are in all layers or in none
    base = decoder_spec(config, hidden_size=2048, layers=24, width=6144, kv_heads=4, length=32_768, words=151_936)
    base = with_experts(config, with_qk_norm(config, base))
    slides = config.boolean("use_sliding_window", default=False)
    return sliding_everywhere(config, base, default=4096) if slides else base


RECIPE = replace(
    QWEN3,
    model_type="qwen3_moe",
    classes=("Qwen3MoeModel",),
    spec=spec,
    rules=(*QWEN3.rules, *expert_rules("gate_proj", "up_proj", "down_proj")),
    heads=(causal_head("Qwen3MoeForCausalLM"), last_token_head("Qwen3MoeForSequenceClassification")),
    # A window is read only where it is switched on; what is said of the router is for its training.
    irrelevant=QWEN3.irrelevant
    | frozenset("max_window_layers output_router_logits router_aux_loss_coef sliding_window".split()),
    tiny={
        **{name: value for name, value in QWEN3.tiny.items() if name != "max_window_layers"},
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeModel"],
        "num_hidden_layers": 4,
        "moe_intermediate_size": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [2],
    },
)
