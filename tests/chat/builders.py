"""Small vocabularies made on the spot, and an engine that says what it is told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from freetoken.chat.pieces import byte_alphabet
from freetoken.chat.tokenizer import Marks, Tokenizer
from freetoken.types import (
    EngineStatistics,
    Ids,
    ModelCard,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the end of the story is here",
    "alpha beta gamma delta one two three four five six seven",
    "user assistant system hello world, what is this? that is all!",
    "Příliš žluťoučký kůň; 你好世界 你好 👍👍",
] * 4


@cache
def byte_level_core() -> Core:
    """About 400 byte-level pieces, four control tokens, `<think>` as an ordinary added token."""
    core = Core(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=list(byte_alphabet()),
        special_tokens=list(CONTROL),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    core.add_tokens([AddedToken("<think>", normalized=False)])
    return core


def marks(core: Core, *, prefix: tuple[int, ...] = ()) -> Marks:
    """The roles of the tiny vocabulary's special tokens."""
    end = core.token_to_id("<|im_end|>")
    return Marks(None, frozenset({end}), prefix, {"eos_token": "<|im_end|>"})


@cache
def byte_level_tokenizer() -> Tokenizer:
    """The tiny vocabulary as our tokenizer."""
    core = byte_level_core()
    return Tokenizer(core, marks(core))


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF header of a Llama-style vocabulary: scored pieces, byte pieces, a space mark."""
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyz.,!?é你"})
    words = [
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "wo",
        "th",
        "▁th",
        "the",
        "▁the",
        "an",
        "▁an",
        "and",
        "▁and",
        "in",
        "ing",
        "▁▁",
        "aa",
        "aaa",
        "er",
        "▁t",
        "▁a",
        "lo",
    ]
    control = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *octets, *words, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0] * len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | changes


def logprobs_for(ids: Sequence[int]) -> list[TokenLogprob]:
    """One entry a token."""
    return [TokenLogprob(token, -0.5) for token in ids]


class ScriptedEngine:
    """A TokenEngine that yields the chunks it was given and notes how its streams ended."""

    def __init__(self, chunks: Sequence[TokenChunk]) -> None:
        self.chunks = chunks
        self.yielded = 0
        self.closed: list[str] = []
        self.finished: list[str] = []
        self.card = ModelCard("tiny", 1000, 400, frozenset())
        self.fault: BaseException | None = None

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Takes everything."""

    async def generate(
        self, prompt: Ids, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        try:
            for chunk in self.chunks:
                self.yielded += 1
                yield chunk
            self.finished.append(request_id)
        finally:
            self.closed.append(request_id)

    def abort(self, request_id: str) -> bool:
        return False

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()

    async def drain(self, deadline_s: float) -> bool:
        return True


def chunked(ids: Sequence[int], size: int, *, finish: Any = "length") -> list[TokenChunk]:
    """The ids in chunks of `size` with log-probabilities; the last chunk carries the finish."""
    chunks = [
        TokenChunk(list(ids[i : i + size]), logprobs_for(ids[i : i + size]))
        for i in range(0, len(ids), size)
    ] or [TokenChunk([], [])]
    chunks[-1].finish = finish
    return chunks
