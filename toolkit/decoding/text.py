"""From generated ids to text: bit by bit, without half characters, and up to a stop text."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

__all__ = ["TextStream"]


class TextStream:
    """The text of one request as it grows. Special tokens are left out.

    Args:
        tokenizer: the artifact's.
        stop: texts that end the generation.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now: what could begin a stop text is held back."""
        self._ids.append(token)
        self.text += self._stream.step(self._tokenizer, token) or ""
        ends = [self.text.find(stop, max(0, self._sent - len(stop))) for stop in self._stop]
        if any(end >= 0 for end in ends):
            self.text = self.text[: min(end for end in ends if end >= 0)]
            self.stopped = True
            return self._send(len(self.text))
        return self._send(len(self.text) - self._held())

    def finish(self) -> str:
        """Return what was held back; characters that are not complete become U+FFFD, as in `Tokenizer.decode`."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            self.text = whole if whole.startswith(self.text) else self.text
        return self._send(len(self.text))

    def _send(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self.text[start : self._sent]

    def _held(self) -> int:
        """How many characters at the end could begin a stop text."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0
