"""C1, C3: the tables of rotary positions, beside the frequencies that transformers computes."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from toolkit.config import ConfigReader
from toolkit.nn.rope import RopeTable

LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[tuple[int, float, dict[str, Any]]] = [
    (128, 5e5, LLAMA31 | {"original_max_position_embeddings": 8192}),
    (64, 5e5, LLAMA31 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
    (128, 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (128, 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False}),
    (128, 1e4, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0}),
    (128, 1e4, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_slow": 3.0}),
    # every dimension turns more than once within the original length: the ramp ends at the last one
    (12, 10.0, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1_000_000}),
    (64, 1e4, {"rope_type": "linear", "factor": 2.5}),
]


@pytest.mark.parametrize(("dims", "base", "rope"), CASES)
def test_tables(dims: int, base: float, rope: dict[str, Any]) -> None:
    parameters = {**rope, "rope_theta": base}
    config = LlamaConfig(head_dim=dims, rope_parameters=parameters, max_position_embeddings=131_072)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    reader = ConfigReader({"rope_parameters": parameters})
    table = RopeTable(reader.rope(dims, 1.0, more=("llama3", "yarn")), 200)
    table.compute_buffers()
    angles = torch.arange(200).float()[:, None] * frequencies
    for ours, theirs in ((table.cos, angles.cos()), (table.sin, angles.sin())):
        assert (ours - theirs * magnitude).abs().max() < 2e-5
