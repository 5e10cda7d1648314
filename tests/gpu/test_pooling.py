from itertools import pairwise

import pytest
import torch

from toolkit.nn.head import Pooling

CUDA = torch.device("cuda")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [40, 384, 1024, 1536])
def test_the_kernel_equals_plain_torch(hidden: int, dtype: torch.dtype, normalize: bool) -> None:
    """B2, M1: empty sequences, one token, many tokens, NaN in the tail, float32 accumulation."""
    states = (torch.randn(5000, hidden, device=CUDA) + 3).to(dtype)
    states[4900:] = float("nan")
    offsets = torch.tensor([0, 1, 1, 33, 4900, 4900, 4900], dtype=torch.int32, device=CUDA)
    ours = Pooling(("mean",), CUDA, normalize=normalize)
    assert ours.fused is not None
    vectors = ours(states, offsets, None)
    bounds = offsets.tolist()
    exact = torch.stack([states[a:b].double().sum(0) / max(b - a, 1) for a, b in pairwise(bounds)])
    if normalize:
        exact = torch.nn.functional.normalize(exact, dim=-1)
    assert vectors.dtype == torch.float32
    assert torch.equal(vectors[1], torch.zeros(hidden, device=CUDA))
    assert (vectors - exact).abs().max() < 1e-5


def test_no_sequences() -> None:
    offsets = torch.zeros(1, dtype=torch.int32, device=CUDA)
    assert Pooling(("mean",), CUDA, normalize=True)(torch.randn(3, 8, device=CUDA), offsets, None).shape == (0, 8)
