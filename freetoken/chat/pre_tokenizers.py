"""How byte-level vocabularies cut text into words before merging, by the name GGUF files give
(`tokenizer.ggml.pre`).

The expressions are facts of the published tokenizers: a vocabulary is only right with the one it
was trained with. Each row's cuts apply one after the other. Checked against the tokenizer.json of
the named families; see tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _END
_LLAMA3 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + _END
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + _END
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _END
)
_TEKKEN = _O200K.replace(_CONTRACTION + "?", "").replace("{1,3}", "")
_DIGIT = r"\p{N}"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+" + _END
)
_MINIMAX = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]" + _END
)
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """One way to cut. whole_words: a word that is a token as it stands is not merged from its
    letters.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    composes: bool = False
    """Text is brought to the composed Unicode form (NFC) first."""
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        splits = [Split(Regex(cut), behavior="isolated") for cut in self.cuts]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.composes else None


_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), whole_words=True, adds_bos=True)
_DIGITS_RULE = PreTokenizerRule((_DIGIT, _GPT2))
_GPT2_RULE = PreTokenizerRule((_GPT2,))
_QWEN2_RULE = PreTokenizerRule((_QWEN2,), composes=True)
_O200K_RULE = PreTokenizerRule((_O200K,), whole_words=True)

DEFAULT = "default"
RULES: dict[str, PreTokenizerRule] = {
    DEFAULT: PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "gpt2", "mpt", "olmo", "phi-2", "dolma", "jais", "roberta-bpe"), _GPT2_RULE
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_RULE
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"), _LLAMA3_RULE),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx"), PreTokenizerRule((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_RULE),
    "qwen35": PreTokenizerRule((_QWEN35,), composes=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K_RULE),
    "tekken": PreTokenizerRule((_TEKKEN,), whole_words=True, adds_bos=True),
    "deepseek-v3": PreTokenizerRule((r"\p{N}{1,3}", _HAN, _DEEPSEEK_V3)),
    "deepseek-coder": PreTokenizerRule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, _DIGIT)
    ),
    "minimax-m2": PreTokenizerRule((_MINIMAX,)),
}
"""Named as GGUF converters name them."""
