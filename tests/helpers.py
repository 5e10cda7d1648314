"""Small modules and batches that need no checkpoint."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from tests.tiny import heat
from toolkit.attention import choose_backend
from toolkit.inputs import Row
from toolkit.nn.model import Encoder, build_encoder
from toolkit.registry import find_recipe

CPU = torch.device("cpu")


def tiny_model(seed: int = 0, **overrides: int) -> Encoder:
    """The BERT recipe's tiny module with random weights, float32 on the CPU."""
    recipe = find_recipe("bert").recipe
    spec, _ = recipe.read_config({**recipe.tiny, **overrides})
    model = build_encoder(spec, choose_backend(spec.attentions, CPU, torch.float32)[1]).to_empty(device="cpu")
    heat(model, seed)
    return model


def random_rows(lengths: Sequence[int], vocab_size: int, seed: int = 0, segments: int = 3) -> list[Row]:
    draw = random.Random(seed)
    return [
        Row(
            ids=np.array([draw.randrange(vocab_size) for _ in range(n)], np.int32),
            segments=np.array([draw.randrange(segments) for _ in range(n)], np.int32),
            embeds=(),
        )
        for n in lengths
    ]
