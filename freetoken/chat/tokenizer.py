"""Text to token ids and back, over the `tokenizers` library. How a vocabulary is read from disk is
told elsewhere.

Encoding goes through `encode_batch_fast`: it releases the interpreter lock (plain `encode` does
not: measured with tokenizers 0.23.3, 200 kB, the event loop stood still for 200 ms against 2 ms)
and skips offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from freetoken.chat.control_tokens import ControlTokens
from freetoken.chat.detokenizer import BytesDetokenizer, Detokenizer, WindowDetokenizer
from freetoken.chat.pieces import read_pieces, read_spelling
from freetoken.chat.vocabulary import add_tokens, make_core

_GUARD = "\U000f5a5a\U000f5a5aguard\U000f5a5a\U000f5a5a"
"""A token of our own to encode in the middle of a text; private-use letters, in no vocabulary."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The special tokens a model calls by a role. `prefix_ids` go before a raw prompt (usually the
    BOS token).
    """

    bos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    names: dict[str, str]
    """Role as chat templates call it (`bos_token`, `eos_token`, ...) to the token's text."""


class Tokenizer:
    """One vocabulary. Immutable after construction and safe to use from several threads.

    Owns the library's tokenizer and the table of token bytes.
    """

    def __init__(self, core: Core, marks: Marks) -> None:
        self._core = core
        self.marks = marks
        spelling = read_spelling(core)
        self._pieces = read_pieces(core, spelling)
        self._has_bytes = spelling is not None
        self.control = ControlTokens.of(core)
        self._plain_core = _plain_twin(core)  # now, not when a user first types a control token

    @property
    def vocab_size(self) -> int:
        """Number of ids, counted from 0 to the largest; a model's own vocabulary may be padded past
        it.
        """
        return len(self._pieces.texts)

    @property
    def bos_id(self) -> int | None:
        return self.marks.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a reply, from all places a checkpoint names them."""
        return self.marks.eos_ids

    @property
    def special_ids(self) -> Collection[int]:
        """Control tokens: they are no part of a reply's text."""
        return self._pieces.specials.keys()

    def id_of(self, token: str) -> int | None:
        """Return the id of a token written as in the vocabulary, or None."""
        return self._core.token_to_id(token)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Return the ids of `text`; names of special tokens in it become those tokens.

        add_special puts the model's prefix (BOS) in front, unless the text already begins with it.
        Nothing is ever appended: an end token after a prompt would end the reply. Lone surrogates
        are read as U+FFFD.
        """
        ids = _encode(self._core, printable(text))
        prefix = list(self.marks.prefix_ids)
        if add_special and ids[: len(prefix)] != prefix:
            return prefix + ids
        return ids

    def encode_guarded(self, text: str, marked: Sequence[int]) -> list[int]:
        """Encode a rendered chat; a special token's name that touches a marked position is plain
        text.

        marked: sorted positions in `text` of characters a user wrote (see `ControlTokens.mark`).
        Without such a name the ids equal encode(text, add_special=False): the text is only cut at
        special tokens that the template wrote, where the library cuts too.
        """
        ids: list[int] = []
        for run in self.control.runs(text, marked):
            if not run.is_plain:
                ids += _encode(self._core, run.text)
            elif run.is_first:
                ids += _encode(self._plain_core, run.text)
            else:  # the guard keeps rules for the very start of a text from applying in the middle
                ids += _encode(self._plain_core, _GUARD + run.text)[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Invalid UTF-8 becomes U+FFFD; unknown ids have no
        text.
        """
        if not self._has_bytes:
            return self._core.decode(list(ids), skip_special_tokens=skip_special)
        specials = self._pieces.specials
        raw = b"".join(
            self._pieces.bytes_of(i) for i in ids if not (skip_special and i in specials)
        )
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if self._pieces.drops_first_space else text

    def token_bytes(self, token: int) -> bytes:
        """Return exactly what a token adds to the byte stream; for a special token the bytes of its
        name.
        """
        return self._pieces.bytes_of(token)

    def token_text(self, token: int) -> str:
        """Return a token's text for display; bytes that are no character alone show as U+FFFD."""
        return self._pieces.bytes_of(token).decode(errors="replace")

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Start the text of a reply to `prompt`.

        SentencePiece vocabularies write a space before a text's first word and drop it again. It is
        dropped here where a text begins: after nothing, or after a special token. A reply that goes
        on in the middle of a text (a raw prompt) keeps its space, else words of prompt and reply
        would run together.
        """
        if not self._has_bytes:
            return WindowDetokenizer(self.decode)
        begins = not prompt or prompt[-1] in self._pieces.specials
        return BytesDetokenizer(
            self._pieces, drop_first_space=begins and self._pieces.drops_first_space
        )


def _plain_twin(core: Core) -> Core:
    """Return a twin that reads special tokens as text: the library's own switch for that would be
    shared by all threads.
    """
    added = sorted(core.get_added_tokens_decoder().items())
    twin = make_core(  # shares the vocabulary, so it costs neither time nor memory
        core.model, normalizer=core.normalizer, pre_tokenizer=core.pre_tokenizer, decoder=None
    )
    add_tokens(twin, [token for _, token in added])
    if any(twin.token_to_id(token.content) != number for number, token in added):
        twin = Core.from_str(core.to_str())  # ids with gaps are kept only by a real copy
    twin.encode_special_tokens = True
    add_tokens(twin, [AddedToken(_GUARD, normalized=False)])
    return twin


def printable(text: str) -> str:
    """Return `text` as valid Unicode: surrogate pairs joined, lone surrogates replaced by U+FFFD.

    JSON can carry half a pair (clients cut strings in the middle of an emoji); the vocabulary has
    no bytes for it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _encode(core: Core, text: str) -> list[int]:
    return core.encode_batch_fast([text], add_special_tokens=False)[0].ids
