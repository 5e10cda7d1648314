"""What becomes of the token states: pooled vectors, scores, or something for each token.

Steps on vectors compute in float32, whatever the model's dtype: there are few of them. Steps on tokens keep the
model's dtype. Shape suffixes: T tokens, S sequences, D hidden size, V vector size, K size of a token's result.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.nn.linear import apply_activation
from toolkit.nn.norm import build_norm
from toolkit.nn.pooling import POOLINGS, select
from toolkit.steps import (
    DenseStep,
    DifferenceStep,
    DivideStep,
    HeadSpec,
    LogStep,
    NormalizeStep,
    NormStep,
    PoolingStep,
    SoftcapStep,
    VocabularyStep,
    WordsStep,
)
from toolkit.toolchain import why_no_compiler

__all__ = ["Head", "Output", "build_head"]


class Output(NamedTuple):
    """Token states [T, D], vectors float32 [S, V], and each token's result [T, K].

    What a task does not have is an empty tensor with no columns.
    """

    states: Tensor
    vectors: Tensor
    tokens: Tensor

    def cut(self, tokens: int, sequences: int) -> "Output":
        """Views of what belongs to the first so many tokens and sequences."""
        return Output(self.states[:tokens], self.vectors[:sequences], self.tokens[:tokens])


class Dense(nn.Module):
    """A linear layer with an activation, and perhaps the input added."""

    def __init__(self, step: DenseStep) -> None:
        super().__init__()
        self.step = step
        self.linear = nn.Linear(step.inputs, step.outputs, step.bias)
        projected = step.residual and step.inputs != step.outputs
        self.residual = nn.Linear(step.inputs, step.outputs, bias=False) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, inputs] → […, outputs]."""
        y = apply_activation(self.linear(x), self.step.activation)
        if self.step.residual:
            y = y + (self.residual(x) if self.residual is not None else x)
        return y


class Vocabulary(nn.Module):
    """Logits over the vocabulary. `table` is the model's token table, [words, width]; see `Head.tie`."""

    table: Tensor

    def __init__(self, outputs: int, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] → […, words]."""
        return F.linear(x, self.table, self.bias)


class Words(nn.Module):
    """Logits of some words, from their rows of the output layer; see `Head.tie` for those of the token table."""

    rows: Tensor

    def __init__(self, step: WordsStep) -> None:
        super().__init__()
        self.step = step
        self.linear = None if step.tied else nn.Linear(step.inputs, step.outputs, bias=False)

    def tie(self, table: Tensor) -> None:
        """Take the words' rows from a table, [vocabulary, width]."""
        rows = table[list(self.step.words)]
        self.rows = rows.float() if self.step.on == "vectors" else rows

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] → […, words]."""
        return F.linear(x, self.rows) if self.linear is None else self.linear(x)


class Difference(nn.Module):
    """The first of two values minus the second."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, 2] → […, 1]."""
        return x[..., :1] - x[..., 1:]


class LogActivation(nn.Module):
    """log(1 + relu), `times` in a row, in float32 also on tokens."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Any shape → float32."""
        x = x.relu().float()  # memory of its own: on tokens it is the largest tensor of all
        for _ in range(self.times):
            x.log1p_()
        return x


class Divide(nn.Module):
    """Division by a number."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x / self.by


class Softcap(nn.Module):
    """cap × tanh(x / cap), each operation rounded to the dtype of x, as the references do it."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return (x / self.cap).tanh() * self.cap


class Normalize(nn.Module):
    """Scale to length 1; a zero vector stays zero."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, V] → […, V]."""
        return F.normalize(x, dim=-1)


class Pooling(nn.Module):
    """Poolings by name, side by side, then perhaps scaled to length 1.

    On CUDA the plain mean and the scaling are one Triton kernel, if Triton can run.
    """

    def __init__(self, modes: tuple[str, ...], device: torch.device, *, normalize: bool = False) -> None:
        super().__init__()
        self.modes, self.normalize = modes, normalize
        self.fused: Callable[[Tensor, Tensor, bool], Tensor] | None = None
        if modes == ("mean",) and device.type == "cuda" and why_no_compiler(device) is None:
            from toolkit.nn.pooling_triton import pool_mean

            self.fused = pool_mean

    def forward(self, states_TD: Tensor, cu_seqlens: Tensor, skip_S: Tensor | None) -> Tensor:
        """[T, D] → float32 [S, V]; the first `skip` tokens of each sequence are left out, None for none."""
        if self.fused is not None and skip_S is None:
            return self.fused(states_TD, cu_seqlens, self.normalize)
        chosen = select(cu_seqlens, skip_S)
        pooled = [POOLINGS[mode](states_TD, chosen) for mode in self.modes]
        vectors_SV = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)
        return F.normalize(vectors_SV, dim=-1) if self.normalize else vectors_SV


class Head(nn.Module):
    """The steps of a HeadSpec, in order. `skips` says whether pooling leaves out a prompt's tokens."""

    def __init__(self, spec: HeadSpec, device: torch.device, skips: bool) -> None:
        super().__init__()
        self.spec, self.skips = spec, skips
        self.steps = nn.ModuleDict()
        before: nn.Module | None = None
        for k, step in enumerate(spec.steps):
            if isinstance(step, PoolingStep):
                module = Pooling(step.modes, device)
            elif isinstance(before, Pooling) and step == NormalizeStep(on="vectors"):
                before.normalize, module = True, nn.Identity()  # the pooling does both
            else:
                module = _build_step(step)
            self.steps[getattr(step, "name", "") or str(k)] = before = module

    def forward(self, states_TD: Tensor, cu_seqlens: Tensor, skip_S: Tensor) -> Output:
        """[T, D], int32 [S + 1], int32 [S] → everything that the steps make of it."""
        tokens = states_TD
        vectors = states_TD.new_empty(cu_seqlens.shape[0] - 1, 0, dtype=torch.float32)
        for step, module in zip(self.spec.steps, self.steps.values(), strict=True):
            if isinstance(step, PoolingStep):
                vectors = module(tokens, cu_seqlens, skip_S if self.skips else None)
            elif step.on == "tokens":
                tokens = module(tokens)
            else:
                vectors = module(vectors)
        own = self.spec.token_width > 0
        return Output(
            states=states_TD, vectors=vectors, tokens=tokens if own else states_TD.new_empty(states_TD.shape[0], 0)
        )

    def per_token(self, states_TD: Tensor) -> Tensor:
        """[T, D] → [T, K]: the steps of a head that has steps on tokens only."""
        assert all(getattr(step, "on", "") == "tokens" for step in self.spec.steps)
        for module in self.steps.values():
            states_TD = module(states_TD)
        return states_TD

    def tie(self, table: Tensor) -> None:
        """Give the model's token table to the step that multiplies with it or some of its rows, if there is one."""
        for module in self.steps.values():
            if isinstance(module, Vocabulary):
                module.table = table.detach()
            elif isinstance(module, Words) and module.step.tied:
                module.tie(table.detach())

    def use_float32_for_vectors(self) -> None:
        """Bring the weights of the steps on vectors to float32."""
        for step, module in zip(self.spec.steps, self.steps.values(), strict=True):
            if getattr(step, "on", "") == "vectors":
                module.float()


def _build_step(step: object) -> nn.Module:
    match step:
        case DenseStep():
            return Dense(step)
        case NormStep():
            return build_norm(step.width, step.norm)
        case VocabularyStep():
            return Vocabulary(step.outputs, step.bias)
        case WordsStep():
            return Words(step)
        case DifferenceStep():
            return Difference()
        case LogStep():
            return LogActivation(step.times)
        case DivideStep():
            return Divide(step.by)
        case SoftcapStep():
            return Softcap(step.cap)
        case NormalizeStep():
            return Normalize()
        case _:
            raise AssertionError(f"no module for {step}")


def build_head(spec: HeadSpec, device: torch.device, *, skips: bool = False) -> Head:
    """Build the module on the meta device, to be filled; `device` is where it is going to run."""
    with torch.device("meta"):
        return Head(spec, device, skips).eval().requires_grad_(False)
