"""What is measured on: texts and lengths drawn from fixed seeds."""

import random
from collections.abc import Sequence

from toolkit.artifact import Artifact

__all__ = ["lognormal_lengths", "random_texts"]


def lognormal_lengths(count: int | None, total: int | None, longest: int, mean_log: float, seed: int = 0) -> list[int]:
    """Lengths `lognormvariate(mean_log, 0.8)` clipped to 8 … longest: `count` of them, or until they fill `total`."""
    draw, lengths = random.Random(seed), []
    while count is None or len(lengths) < count:
        length = int(min(longest, max(8, draw.lognormvariate(mean_log, 0.8))))
        if total is not None:
            left = total - sum(lengths)
            if left < 8:
                break
            length = min(length, left)
        lengths.append(length)
    return lengths


def random_texts(artifact: Artifact, lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Texts of whole words of the artifact's vocabulary that tokenize to these lengths, special tokens included."""
    from tokenizers import Tokenizer

    vocab = Tokenizer.from_file(str(artifact.folder / "tokenizer.json")).get_vocab()
    words = sorted(word for word in vocab if word.isascii() and word.isalpha() and word.islower() and len(word) > 2)
    draw = random.Random(seed)
    return [" ".join(draw.choice(words) for _ in range(length - 2)) for length in lengths]
