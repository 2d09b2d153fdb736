"""Stop strings in a growing text. Characters only; no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class _Needle:
    """One stop string and how much of it the text ends with: Knuth-Morris-Pratt, one step a
    character.
    """

    __slots__ = ("_fallback", "_text", "matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self.matched = 0
        """Length of the longest proper prefix of the string that the text seen so far ends with."""
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length]
            length += text[i] == text[length]
            self._fallback[i + 1] = length

    def feed(self, chunk: str) -> int | None:
        """Read `chunk`; return how many of its characters were read when the string was complete,
        else None.
        """
        text, state, fallback = self._text, self.matched, self._fallback
        start = 0 if state else chunk.find(text[0])
        if start < 0:
            return None
        for i in range(start, len(chunk)):
            letter = chunk[i]
            while state and text[state] != letter:
                state = fallback[state]
            state += text[state] == letter
            if state == len(text):
                return i + 1
        self.matched = state
        return None


class StopScanner:
    """Lets text through up to the first stop string; holds back only a tail that may still become
    one.

    First is the one complete first, character by character, so the result does not depend on how
    the text is cut into chunks; of two that end together the longer. After a match nothing comes
    out any more.
    """

    __slots__ = ("_held", "_needles", "_stops", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._needles = [_Needle(stop) for stop in self._stops]
        self._held = ""
        self.match: str | None = None
        """The stop string that ended the text."""

    def push(self, chunk: str) -> str:
        """Return the part of all text so far that is now certain to be kept."""
        if self.match is not None or not chunk:
            return ""
        text = self._held + chunk
        best: tuple[int, int] | None = None
        held = 0
        for stop, needle in zip(self._stops, self._needles, strict=True):
            read = needle.feed(chunk)
            if read is None:
                held = max(held, needle.matched)
                continue
            end = len(self._held) + read
            if best is None or (end, end - len(stop)) < best:
                best = (end, end - len(stop))
                self.match = stop
        if best is not None:
            self._held = ""
            return text[: best[1]]
        keep = len(text) - held
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the tail held back: the text ended and it became no stop string."""
        held, self._held = self._held, ""
        return held
