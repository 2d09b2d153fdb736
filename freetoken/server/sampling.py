"""Request fields and model defaults -> SamplingParams. Request values win; ranges that need the
model are checked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import cast

import msgspec

from freetoken.errors import RequestError
from freetoken.server.schema import Reply, Settings, Unsupported
from freetoken.types import ModelCard, SamplingParams

SamplingDefaults = Mapping[str, float]
"""Fields of SamplingParams that a model's authors recommend."""

_DEFAULT_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


def defaults_from(generation_config: Mapping[str, object]) -> dict[str, float]:
    """Return the sampling settings of a checkpoint's generation_config; values out of range or not
    finite are left out.
    """
    defaults: dict[str, float] = {}
    for name, (low, high) in _DEFAULT_RANGES.items():
        value = generation_config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value) and low <= value <= high:
            # Hugging Face writes 0 for "keep all"; ours is -1.
            defaults[name] = -1 if name == "top_k" and value == 0 else value
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    return defaults


def sampling_params(
    request: Reply,
    defaults: SamplingDefaults,
    card: ModelCard,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Return the settings of one choice. Raises RequestError naming the field."""
    _check_ids(request, card)
    if request.top_k == 0:
        raise RequestError("top_k: expected -1 (keep all) or at least 1, got 0", param="top_k")
    plain = SamplingParams()

    def value(name: str, given: float | None) -> float:
        return given if given is not None else defaults.get(name, getattr(plain, name))

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=value("temperature", request.temperature),
        top_k=int(value("top_k", request.top_k)),
        top_p=value("top_p", request.top_p),
        min_p=value("min_p", request.min_p),
        seed=request.seed,
        repetition_penalty=value("repetition_penalty", request.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias or {},
        stop=_stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def params_from(
    settings: Mapping[str, object], defaults: SamplingDefaults, card: ModelCard
) -> SamplingParams:
    """Return the settings of a reply asked for in Python: fields of SamplingParams by name, checked
    as the HTTP routes check theirs. None means left out. Raises RequestError naming the field.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    known = [field.name for field in fields(SamplingParams)]
    for name, value in given.items():
        if name not in known:
            raise RequestError(
                f"expected a setting of {', '.join(known)}, got {name!r}", param=name
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: expected a finite number, got {value}", param=name)
    try:
        request = msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        raise _named(str(error), given) from None
    return sampling_params(
        request, defaults, card, max_tokens=request.max_tokens, logprobs=request.logprobs
    )


def _named(text: str, given: Mapping[str, object]) -> RequestError:
    what, _, where = text.replace("`", "").partition(" - at ")
    name = where.rpartition("$.")[2].partition("[")[0]
    expected = what.partition(", got ")[0]
    return RequestError(
        f"{name}: {expected[:1].lower()}{expected[1:]}, got {given.get(name)!r:.80}", param=name
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Return the settings of choice `index`: with a seed each choice gets its own, so that they
    differ and repeat.
    """
    return (
        params if params.seed is None or index == 0 else replace(params, seed=params.seed + index)
    )


def refuse_unsupported(request: Unsupported) -> None:
    """Raise RequestError for the first field that would change the output's meaning and cannot be
    honoured.
    """
    for name in Unsupported.__struct_fields__:
        if name in Reply.__struct_fields__:
            continue
        value = getattr(request, name)
        if value and not (name == "response_format" and _is_plain_text(value)):
            raise RequestError(
                f"{name}: expected no constraint on the output's form, which this server cannot"
                " enforce yet; leave the field out and describe the form in the prompt",
                param=name,
                code="unsupported_parameter",
            )


def _is_plain_text(response_format: object) -> bool:
    return (
        isinstance(response_format, dict)
        and cast("dict[str, object]", response_format).get("type") == "text"
    )


def _check_ids(request: Reply, card: ModelCard) -> None:
    for name, ids in (
        ("logit_bias", request.logit_bias or ()),
        ("stop_token_ids", request.stop_token_ids or ()),
    ):
        bad = next((token for token in ids if token >= card.vocab), None)
        if bad is not None:
            raise RequestError(
                f"{name}: expected token ids below {card.vocab}, got {bad}", param=name
            )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
