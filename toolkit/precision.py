"""Does a model stay within float16's range? A residual stream that was trained in bfloat16 may not."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.attention import choose_backend
from toolkit.batch import pack
from toolkit.errors import UnsupportedError
from toolkit.inputs import Row
from toolkit.nn.head import build_head
from toolkit.nn.model import build_encoder, fill
from toolkit.spec import EncoderSpec
from toolkit.steps import HeadSpec

__all__ = ["PROBE_TEXTS", "probe_float16"]

LARGEST = torch.finfo(torch.float16).max
_MARGIN = 4
PROBE_TEXTS = (
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "Large values tend to stand at the first token, at separators and at full stops. They are the same in every text.",
)


class _Peak(TorchDispatchMode):
    """The largest product or sum that is computed within it, and the module that computes it.

    Norms and activations are not looked at: they compute in float32, and their results are smaller.
    """

    watched = (
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten.add,
        torch.ops.aten.mul,
        torch.ops.aten.embedding,
        torch.ops.toolkit.match_rows,
        torch.ops.toolkit.grouped_linear,
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.size, self.where = 0.0, ""
        self._inside = ["embeddings"]  # the encoder calls them by other names than forward
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
            module.register_forward_hook(lambda *_: self._leave())

    def _leave(self) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        watched = func.overloadpacket in self.watched and not self._inside[-1].endswith("mix")  # which sums in float32
        if watched and result.is_floating_point() and result.numel():
            size = float(result.abs().max())
            if size > self.size:
                self.size, self.where = size, self._inside[-1]
        return result


def probe_float16(
    spec: EncoderSpec, head: HeadSpec, weights: Mapping[str, Tensor], texts: Sequence[Sequence[int]]
) -> list[str]:
    """Run the model in float32 on the CPU, and look how large its values become.

    Args:
        spec, head: the model.
        weights: float32, of the encoder, and of the head by names that begin with `head.`.
        texts: token ids of texts; sequences of random ids are added.

    Returns:
        A warning, if values come near float16's largest.

    Raises:
        UnsupportedError: they exceed it.
    """
    cpu = torch.device("cpu")
    encoder = build_encoder(spec, choose_backend(spec.attentions, cpu, torch.float32)[1])
    steps = build_head(head, cpu)
    parts = nn.ModuleDict({"encoder": encoder, "head": steps})
    fill(parts, {name if name.startswith("head.") else f"encoder.{name}": w for name, w in weights.items()}, cpu)
    steps.tie(encoder.embeddings.token.weight)
    draw = random.Random(0)
    lengths = sorted({1, 16, min(128, spec.usable_length)})
    drawn = [[draw.randrange(spec.embedding.vocab_size) for _ in range(length)] for length in lengths]
    words = spec.embedding.vocab_size  # what the tokenizer has beyond the table is refused when it turns up
    known = [[id for id in ids if id < words][: spec.usable_length] for ids in (*texts, *drawn)]
    sequences = [np.array(ids, np.int32) for ids in known]
    rows = [Row(ids=ids, segments=np.zeros_like(ids), embeds=()) for ids in sequences]
    batch = pack(rows, spec.embedding.position_start, spec.embedding.position_pad)
    with torch.no_grad(), _Peak(parts) as peak:
        tokens = encoder.forward_ids(*batch.encoder_args())
        for step, module in zip(head.steps, steps.steps.values(), strict=True):
            if getattr(step, "on", "") == "tokens":
                tokens = module(tokens)
    found = f"{peak.where.removeprefix('encoder.')} reaches {peak.size:,.0f}, the largest float16 is {LARGEST:,.0f}"
    if not peak.size <= LARGEST:
        raise UnsupportedError(f"float16 cannot hold this model's values: {found}; use --dtype bfloat16 or float32")
    if peak.size * _MARGIN > LARGEST:
        return [f"float16 is near its limit with this model: {found}; bfloat16 or float32 are safer"]
    return []
