"""Hugging Face checkpoints as compiled, graph-captured modules with proven numbers.

The names below load on first use, so that `import toolkit` (and `toolkit --help`) need not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from toolkit import errors

if TYPE_CHECKING:
    from toolkit.conversion import ConversionReport, convert
    from toolkit.decoding.cache import CacheOptions
    from toolkit.decoding.results import Generation
    from toolkit.decoding.runner import DecoderRunner
    from toolkit.decoding.sampling import SamplingParams
    from toolkit.inputs import MixedPrompt, PromptEmbeds, TokenIds
    from toolkit.parity import verify
    from toolkit.runner import Runner, load

__version__ = "0.1.0"
__all__ = [
    "convert",
    "load",
    "verify",
    "TokenIds",
    "PromptEmbeds",
    "MixedPrompt",
    "Runner",
    "DecoderRunner",
    "CacheOptions",
    "SamplingParams",
    "Generation",
    "ConversionReport",
    "errors",
    "__version__",
]

_HOME = {
    "convert": "toolkit.conversion",
    "ConversionReport": "toolkit.conversion",
    "load": "toolkit.runner",
    "Runner": "toolkit.runner",
    "DecoderRunner": "toolkit.decoding.runner",
    "CacheOptions": "toolkit.decoding.cache",
    "SamplingParams": "toolkit.decoding.sampling",
    "Generation": "toolkit.decoding.results",
    "verify": "toolkit.parity",
    "TokenIds": "toolkit.inputs",
    "PromptEmbeds": "toolkit.inputs",
    "MixedPrompt": "toolkit.inputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
