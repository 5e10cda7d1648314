"""Gemma 3's text model (Gemma Team, 2025, https://arxiv.org/abs/2503.19786), a causal decoder.

As a bidirectional encoder it is EmbeddingGemma (Vera et al., 2025, https://arxiv.org/abs/2509.20354).
Reference: transformers' Gemma3TextModel, without and with `use_bidirectional_attention`.
"""

from dataclasses import replace

from toolkit.decoders import LAYER
from toolkit.heads import causal_head, last_token_head
from toolkit.recipe import ConfigReader
from toolkit.spec import EncoderSpec
from toolkit.weights import drop, rename

from .gemma import gemma_spec
from .gemma2 import RECIPE as GEMMA2
from .gemma2 import capped_logits, with_kinds


def spec(config: ConfigReader) -> EncoderSpec:
    """Effective configuration; defaults are Gemma3TextConfig's."""
    causal = not config.boolean("use_bidirectional_attention", default=False)
    # transformers widens the window by one token to each side where is_causal is false.
    config.neutral(is_causal=None, attn_logit_softcapping=None)
    base = gemma_spec(config, words=262_208, length=131_072, causal=causal)
    first = base.attentions[0]
    full = replace(
        first,
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=base.final_norm,
        rope=config.rope(first.head_dim, 1e6, "rope_theta", "full_attention"),
    )
    # A causal window holds the token itself. A window to both sides is the whole width: transformers makes it
    # w // 2 + 1, exclusive, when it reads a file and undoes that in writing.
    window = config.integer("sliding_window", 4096, minimum=int(causal))
    local = replace(
        full,
        reach=window - 1 if causal else window // 2,
        rope=config.rope(first.head_dim, 1e4, "rope_local_base_freq", "sliding_attention"),
    )
    every = config.optional_integer("sliding_window_pattern") or 6
    return with_kinds(config, base, full, local, lambda k: (k + 1) % every > 0)


RECIPE = replace(
    GEMMA2,
    model_type="gemma3_text",
    classes=("Gemma3TextModel",),
    spec=spec,
    heads=(
        causal_head("Gemma3ForCausalLM", tied=True, after=capped_logits(None)),
        last_token_head("Gemma3TextForSequenceClassification", pad=0),
    ),
    rules=(
        *GEMMA2.rules,
        rename("blocks.{i}.attention.q_norm.weight", LAYER + "self_attn.q_norm.weight"),
        rename("blocks.{i}.attention.k_norm.weight", LAYER + "self_attn.k_norm.weight"),
        drop("rotary_emb_local.inv_freq", why="rotary frequencies are computed from config.json"),
    ),
    # The reference does not read the pattern under its private name.
    irrelevant=GEMMA2.irrelevant | {"_sliding_window_pattern"},
    tiny={
        **{name: value for name, value in GEMMA2.tiny.items() if name != "attn_logit_softcapping"},
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
)
RECIPES = (
    RECIPE,
    replace(
        RECIPE,
        classes=("Gemma3TextModel", "Gemma3ForCausalLM"),
        heads=(),
        when={"use_bidirectional_attention": True},
        tiny={**RECIPE.tiny, "use_bidirectional_attention": True},
        note="bidirectional; sliding_window is the whole width of the window",
    ),
)
