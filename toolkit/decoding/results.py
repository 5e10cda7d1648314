"""What `generate` and `stream` return."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Chunk", "FinishReason", "Generation", "Logprobs"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Natural logarithms of probabilities under the model's own logits, before penalties, temperature and filters.

    Attributes:
        chosen: of each token that is there.
        top: for each of these places the likeliest ids and theirs, the likeliest first; empty if none were asked for.
    """

    chosen: list[float]
    top: list[dict[int, float]]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How one input went on.

    Attributes:
        token_ids: what was generated; an end token that stopped it is the last of them.
        text: without special tokens, and cut before a stop text.
        logprobs: of `token_ids`; None if not asked for.
        prompt_logprobs: of the prompt's tokens but the first; None if not asked for.
        finish_reason: "stop" for an end token or a stop text, "length" for `max_new_tokens`, "cancelled".
        prompt_tokens: the length of the prompt.
    """

    token_ids: list[int]
    text: str
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    finish_reason: FinishReason
    prompt_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        index: which of the inputs it belongs to.
        text: what became certain; empty while a character or a stop text is not complete.
        token_id: the token; None where an input ended without one.
        finish_reason: set on the last chunk of an input.
    """

    index: int
    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
