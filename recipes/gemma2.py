"""Gemma 2 (Gemma Team, 2024, https://arxiv.org/abs/2408.00118); reference: transformers' Gemma2Model."""

from collections.abc import Callable
from dataclasses import replace

from toolkit.config import LAYER_TYPES
from toolkit.decoders import LAYER, sliding, with_blocks
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import AttentionSpec, BlockSpec, EncoderSpec
from toolkit.steps import SoftcapStep, Step
from toolkit.weights import rename

from .gemma import RECIPE as GEMMA
from .gemma import gemma_spec


def with_kinds(
    config: ConfigReader,
    base: EncoderSpec,
    full: AttentionSpec,
    local: AttentionSpec,
    slides: Callable[[int], bool],
) -> EncoderSpec:
    """Norms around each branch; attention as `layer_types` says or, where it is absent, `local` where `slides`."""
    count = len(base.blocks)
    types = config.strings("layer_types", count, LAYER_TYPES) or [LAYER_TYPES[slides(k)] for k in range(count)]
    of_kind: dict[str, AttentionSpec] = dict(zip(LAYER_TYPES, (full, local), strict=True))

    def change(k: int, block: BlockSpec) -> BlockSpec:
        return replace(block, arrangement="sandwich", attention=of_kind[types[k]])

    return with_blocks(base, change)


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Gemma2Config's."""
    config.neutral(is_causal=(None, True), use_bidirectional_attention=(None, False))
    base = gemma_spec(config)
    first = base.attentions[0]
    full = replace(
        first,
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        softcap=config.optional_positive("attn_logit_softcapping", 50.0),
        rope=config.rope(first.head_dim, 10_000.0, more=("llama3", "yarn")),
    )
    window = config.integer(("sliding_window", "sliding_window_size"), 4096)
    return with_kinds(config, base, full, sliding(full, window), lambda k: k % 2 == 0)


def capped_logits(default: float | None) -> Callable[[ConfigReader], tuple[Step, ...]]:
    """Logits bounded by `final_logit_softcapping`; null is no bound."""

    def steps(config: ConfigReader) -> tuple[Step, ...]:
        cap = config.optional_positive("final_logit_softcapping", default)
        return () if cap is None else (SoftcapStep(on="tokens", cap=cap),)

    return steps


RECIPE = replace(
    GEMMA,
    model_type="gemma2",
    classes=("Gemma2Model",),
    spec=spec,
    heads=(
        causal_head("Gemma2ForCausalLM", tied=True, after=capped_logits(30.0)),
        last_token_head("Gemma2ForSequenceClassification", pad=0),
    ),
    rules=(
        # Llama's names, but for the norms: post_attention_layernorm comes after attention, not before the MLP.
        *(rule for rule in GEMMA.rules if rule.target != "blocks.{i}.mlp_norm.weight"),
        rename("blocks.{i}.attention_out_norm.weight", LAYER + "post_attention_layernorm.weight"),
        rename("blocks.{i}.mlp_norm.weight", LAYER + "pre_feedforward_layernorm.weight"),
        rename("blocks.{i}.mlp_out_norm.weight", LAYER + "post_feedforward_layernorm.weight"),
    ),
    # Dropout is off; pad tokens are ordinary rows of the table; the head reads final_logit_softcapping; hidden_act
    # is read where it is not null.
    irrelevant=frozenset(
        "attention_dropout cache_implementation final_logit_softcapping hidden_act pad_token_id".split()
    ),
    tiny={
        **GEMMA.tiny,
        "model_type": "gemma2",
        "architectures": ["Gemma2Model"],
        "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.5,
        "sliding_window": 6,
    },
)
