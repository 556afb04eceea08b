"""Owns how byte-level BPE vocabularies of GGUF files cut text into words before merging: one row per name.

Knows no vocabulary. The patterns are those of the models' own ``tokenizer.json`` files, in Oniguruma syntax; several
in a row are applied one after another to the pieces the one before left. Names are values of ``tokenizer.ggml.pre``
(llama.cpp, ``llama_vocab_pre_type``). Read next: ``gguf_tokenizer.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """How one family of vocabularies cuts text."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token as it stands is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Whether BOS comes first when the file does not say."""


def _characters(ranges: str) -> str:
    """A character class from hexadecimal code points and ranges. Spelled so because NFC would change the literals."""
    return "".join("-".join(rf"\x{{{point}}}" for point in part.split("-")) for part in ranges.split())


_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CJK: Final = _characters("4E00-9FA5 800-4E00 AC00-D7FF")
_DEEPSEEK_LETTERS: Final = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_SIGNS: Final = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_ASCII_SIGN: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _words(letters: str, digits: str, *, contraction: str = _CONTRACTION, not_signs: str = r"\s\p{L}\p{N}") -> str:
    """The pattern that Llama 3 took from OpenAI's cl100k and Qwen changed in its digits."""
    return rf"{contraction}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?[^{not_signs}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, ending: str) -> str:
    """The pattern of OpenAI's o200k: a word changes case at most once, from upper to lower."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = Pretokenizer((_words(r"\p{L}+", r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LLAMA3_MERGING = Pretokenizer(_LLAMA3.patterns)
_QWEN2 = Pretokenizer((_words(r"\p{L}+", r"\p{N}"),))
_QWEN35 = Pretokenizer((_words(r"[\p{L}\p{M}]+", r"\p{N}", not_signs=r"\s\p{L}\p{M}\p{N}"),))
_PLAIN_GPT2 = Pretokenizer((_GPT2,))
_DIGITWISE_GPT2 = Pretokenizer((r"\p{N}", _GPT2))
_FALCON = Pretokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
_DEEPSEEK_LLM = Pretokenizer(
    (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_SIGNS}]+", r"\s+$", f"[{_CJK}]+", r"\p{N}+")
)
_DEEPSEEK_CODER = Pretokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_CJK}]+", r"\p{N}"))
_DEEPSEEK_V3 = Pretokenizer(
    (
        r"\p{N}{1,3}",
        f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+",
        rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_GPT_4O = Pretokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),), ignore_merges=True)
_TEKKEN = Pretokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True)

PRETOKENIZERS: Final[dict[str, Pretokenizer]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_MERGING),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"), _PLAIN_GPT2),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITWISE_GPT2
    ),
    "falcon": _FALCON,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "tekken": _TEKKEN,
}
