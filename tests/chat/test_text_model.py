"""From engine chunks to text deltas: one pipeline, any chunk size, exact ends, prompt aborts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.chat.template import ChatTemplate
from freetoken.chat.text_model import THREAD_CHARS, TextDelta, TextModel
from freetoken.chat.tokenizer import Tokenizer
from freetoken.errors import RequestError
from freetoken.types import SamplingParams, TokenChunk
from tests.chat.builders import CHATML, ScriptedEngine, byte_level_tokenizer, chunked

TOKENIZER = byte_level_tokenizer()
COUNTING = "one two three four five six seven"
SIZES = pytest.mark.parametrize("size", [1, 2, 7])


def ids_of(text: str) -> list[int]:
    """Ids of a reply's text."""
    return TOKENIZER.encode(text, add_special=False)


async def collect(
    engine: ScriptedEngine, params: SamplingParams, tokenizer: Tokenizer = TOKENIZER
) -> list[TextDelta]:
    """All deltas of one stream."""
    model = TextModel(engine, tokenizer, None)
    async with aclosing(model.stream([1, 2], params, request_id="r")) as deltas:
        return [delta async for delta in deltas]


def run(chunks: Sequence[TokenChunk], **params: Any) -> list[TextDelta]:
    """All deltas of a stream of these chunks."""
    return asyncio.run(collect(ScriptedEngine(chunks), SamplingParams(**params)))


def text_of(deltas: Sequence[TextDelta]) -> str:
    """What the client sees in the end."""
    return "".join(delta.text for delta in deltas)


@SIZES
def test_r03_chunk_size_does_not_change_the_sum(size: int) -> None:
    """R03: sending every Nth token dropped the tokens between; the sums must agree."""
    ids = ids_of("Příliš 你好 👨‍👩‍👧‍👦 " + COUNTING)
    deltas = run(chunked(ids, size))
    assert text_of(deltas) == TOKENIZER.decode(ids)
    assert [token for delta in deltas for token in delta.ids] == ids
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


@SIZES
@pytest.mark.parametrize("stop", ["four five", "ree", "\nUser:", "one"])
def test_h21_stop_string_cuts_exactly_at_any_chunk_size(size: int, stop: str) -> None:
    """H21: a stop string across tokens was missed, or its first half leaked."""
    text = COUNTING + "\nUser: more"
    deltas = run(chunked(ids_of(text), size), stop=(stop,))
    assert text_of(deltas) == text[: text.index(stop)]
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", stop)


@SIZES
def test_r14_tokens_after_the_match_are_dropped_everywhere(size: int) -> None:
    """R14: run-ahead tokens of the same step leaked as text, ids or log-probabilities."""
    ids = ids_of(COUNTING)
    deltas = run(chunked(ids, size), stop=("five",), logprobs=0)
    used = [token for delta in deltas for token in delta.ids]
    assert used == ids[: len(used)]
    assert TOKENIZER.decode(used).endswith("five")
    assert [p.token for delta in deltas for p in delta.logprobs or []] == used
    assert text_of(deltas) == "one two three four "


def test_stop_match_closes_the_engine_before_the_last_delta() -> None:
    """A stream whose text is complete must not cost another step."""
    engine = ScriptedEngine(chunked(ids_of(COUNTING), 1))

    async def main() -> None:
        model = TextModel(engine, TOKENIZER, None)
        stream = model.stream([1], SamplingParams(stop=("three",)), request_id="r")
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if delta.finish is not None:
                    assert engine.closed == ["r"]
        assert engine.finished == []

    asyncio.run(main())
    assert engine.yielded < len(engine.chunks)


def test_r11_closing_the_stream_closes_the_engine_and_leaves_no_trace() -> None:
    """R11: after a cancelled turn the next one must not see its tokens or its held-back text."""
    engine = ScriptedEngine(chunked(ids_of("hello wor") + ids_of("🦊")[:1], 1))

    async def main() -> None:
        model = TextModel(engine, TOKENIZER, None)
        params = SamplingParams(stop=("world",))
        async with aclosing(model.stream([1], params, request_id="first")) as deltas:
            async for _ in deltas:
                if engine.yielded == len(engine.chunks):
                    break
        assert engine.closed == ["first"]
        engine.chunks = chunked(ids_of("ld is here"), 1)
        async with aclosing(model.stream([1], params, request_id="second")) as deltas:
            assert text_of([delta async for delta in deltas]) == "ld is here"
        assert engine.closed == ["first", "second"]

    asyncio.run(main())


def test_r13_last_text_goes_through_the_stop_strings_too() -> None:
    """R13: the final flush went round the pipeline and wrote what should have been cut."""
    ids = ids_of("abc") + ids_of("🦊")[:1]
    deltas = run(chunked(ids, 1), stop=("c\ufffd",))
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", "c\ufffd")


@SIZES
def test_r13_held_back_tail_comes_with_the_finish(size: int) -> None:
    """R13: a reply that ends inside a possible stop string lost its end."""
    deltas = run(chunked(ids_of("one two thr"), size), stop=("three",))
    assert text_of(deltas) == "one two thr"
    assert (deltas[-1].finish, deltas[-1].stop) == ("length", None)


def test_h22_half_a_character_at_max_tokens_is_flushed_once() -> None:
    """H22: an emoji cut by max_tokens vanished or came as several U+FFFD."""
    ids = ids_of("ok") + ids_of("🦊")[:2]
    deltas = run(chunked(ids, 1))
    assert text_of(deltas) == "ok\ufffd"
    assert "\ufffd" not in text_of(deltas[:-1])


def test_end_token_has_no_text_but_counts() -> None:
    """The token that ended a reply is usage, not text, even if it is an ordinary word."""
    words = ids_of("one two")
    end = TOKENIZER.id_of("<|im_end|>") or -1
    deltas = run(chunked([*words, end], 2, finish="stop"))
    assert text_of(deltas) == "one two"
    assert [token for delta in deltas for token in delta.ids] == [*words, end]
    deltas = run(chunked(words, 1, finish="stop"), stop_token_ids=(words[-1],))
    assert text_of(deltas) == TOKENIZER.decode(words[:-1])
    # A scripted engine may stop without an end token: then the last token is text.
    assert text_of(run(chunked(words, 1, finish="stop"))) == "one two"


def test_ignored_end_token_inside_a_reply_is_not_shown() -> None:
    """ignore_eos goes past end tokens; they stay invisible."""
    end = TOKENIZER.id_of("<|im_end|>") or -1
    ids = [*ids_of("one"), end, *ids_of(" two"), end]
    assert text_of(run(chunked(ids, 1, finish="length"), ignore_eos=True)) == "one two"


def test_every_chunk_gives_one_delta_even_without_text() -> None:
    """Usage and progress are counted by deltas; one that waits for bytes still carries its ids."""
    ids = ids_of("👨‍👩‍👧‍👦")
    deltas = run(chunked(ids, 1))
    assert [delta.ids for delta in deltas] == [[token] for token in ids]
    assert "" in [delta.text for delta in deltas]


def test_engine_that_ends_without_a_finish_gives_one() -> None:
    """Every stream has exactly one finish, also when somebody else aborted it."""
    chunks = [TokenChunk(ids_of("one t"))]
    deltas = run(chunks, stop=("two",))
    assert [delta.finish for delta in deltas] == [None, "abort"]
    assert text_of(deltas) == "one t"


def test_cached_tokens_are_passed_on() -> None:
    """Clients read prefix reuse from usage."""
    deltas = run(
        [TokenChunk(ids_of("a"), cached_tokens=5), TokenChunk([], finish="stop", cached_tokens=5)]
    )
    assert {delta.cached_tokens for delta in deltas} == {5}


@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=24),
    size=st.integers(1, 8),
    stop=st.lists(st.text("abe t\ufffd", min_size=1, max_size=3), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_r03_any_ids_any_chunks_any_stops_give_one_result(
    ids: list[int], size: int, stop: list[str]
) -> None:
    """R03, H21, H22 together: the joined text does not depend on the chunks."""
    params = {"stop": tuple(stop), "ignore_eos": True}
    one, many = run(chunked(ids, 1), **params), run(chunked(ids, size), **params)
    assert text_of(one) == text_of(many)
    assert (one[-1].finish, one[-1].stop) == (many[-1].finish, many[-1].stop)
    assert [t for d in one for t in d.ids] == [t for d in many for t in d.ids]
    if not stop:
        assert text_of(one) == TOKENIZER.decode(ids)


def test_h24_chat_without_template_is_refused_before_anything_is_sent() -> None:
    """H24: status 200 and then a broken stream."""
    model = TextModel(ScriptedEngine([]), TOKENIZER, None)
    with pytest.raises(RequestError) as error:
        model.render([{"role": "user", "content": "hi"}])
    assert error.value.code == "no_chat_template"
    assert "--chat-template" in str(error.value)
    with pytest.raises(RequestError):
        asyncio.run(model.render_async([{"role": "user", "content": "hi"}]))
    assert asyncio.run(model.encode("hi")) == ids_of("hi")


@pytest.mark.parametrize("length", [10, THREAD_CHARS + 1])
def test_long_prompts_are_tokenised_beside_the_loop(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt in the loop stops every other stream; a short one needs no thread."""
    threads: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    model = TextModel(ScriptedEngine([]), TOKENIZER, ChatTemplate(CHATML))
    asyncio.run(model.encode("a" * length))
    assert (threads[0] != threading.get_ident()) is (length > THREAD_CHARS)
    message = {"role": "user", "content": [{"type": "text", "text": "a" * length}]}
    rendered = asyncio.run(model.render_async([message]))
    assert rendered == model.render([{"role": "user", "content": "a" * length}])


def test_rendered_chat_has_the_templates_tokens() -> None:
    """The chat's ids are those of the rendered text, special tokens included."""
    model = TextModel(ScriptedEngine([]), TOKENIZER, ChatTemplate(CHATML))
    rendered = model.render([{"role": "user", "content": "hi"}])
    assert rendered.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.ids == ids_of(rendered.text)
