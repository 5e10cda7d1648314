"""From generated ids to text: bit by bit, without half characters, and up to a stop text."""

from collections.abc import Sequence

from tokenizers import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """The text of one request as it grows. Special tokens are left out.

    Args:
        tokenizer: the artifact's.
        stop: texts that end the generation.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # Tokens from `_start` on are decoded together: those before `_read` are in the text, as `_known` characters.
        self._ids: list[int] = []
        self._start = self._read = self._known = 0
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now: what could begin a stop text is held back."""
        self._ids.append(token)
        self._grow(whole=False)
        return self._send(len(self.text) - (0 if self.stopped else self._held()))

    def finish(self) -> str:
        """Return what was held back; characters that are not complete become U+FFFD, as in `Tokenizer.decode`."""
        if not self.stopped:
            self._grow(whole=True)
        return self._send(len(self.text))

    def _grow(self, *, whole: bool) -> None:
        """Add what new tokens say, once their last character is complete or if it has to be `whole`; look for stops.

        They are decoded behind the tokens before them, on which their spaces depend.
        """
        text = self._decode(self._start)
        if len(text) <= self._known or (text.endswith("\ufffd") and not whole):
            return
        self.text += text[self._known :]
        self._start, self._read = self._read, len(self._ids)
        self._known = len(self._decode(self._start))
        ends = [self.text.find(stop, max(0, self._sent - len(stop))) for stop in self._stop]
        if any(end >= 0 for end in ends):
            self.text = self.text[: min(end for end in ends if end >= 0)]
            self.stopped = True

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)

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
