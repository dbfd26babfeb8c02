r"""PreTokenizer: how text is cut into words before byte-level BPE merges them, by `tokenizer.ggml.pre`.

The names and what they mean are llama.cpp's (src/llama-vocab.cpp, src/unicode.cpp, build 11549). Where its
engine deviates from the model's own tokenizer.json, its rule is the one written here, because a GGUF names that
engine's rule: upper and lower case are told apart in ASCII only, contractions fold ASCII case only, and the
character classes are those of Unicode 15.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Regex, pre_tokenizers

from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

# letters, marks, numbers, punctuation and symbols that Unicode 16.0 added; llama.cpp's tables do not know them
_ADDED_IN_UNICODE_16 = (
    r"\x{897}\x{1B4E}-\x{1B4F}\x{1B7F}\x{1C89}-\x{1C8A}\x{2427}-\x{2429}\x{31E4}-\x{31E5}\x{A7CB}-\x{A7CD}"
    r"\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}\x{10EC2}-\x{10EFC}\x{11380}-\x{113E2}"
    r"\x{116D0}-\x{116E3}\x{11BC0}-\x{11BF9}\x{11F5A}\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}"
    r"\x{18CFF}\x{1CC00}-\x{1CEB3}\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}-\x{1FA8F}\x{1FABE}\x{1FAC6}"
    r"\x{1FADC}-\x{1FADF}\x{1FAE9}\x{1FBCB}-\x{1FBEF}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text into words, and what comes with its name.

    Each regex (Oniguruma's syntax) cuts every piece that the one before it left: its matches and the gaps between
    them become pieces. The defaults hold where the GGUF has no key of its own.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_bos: bool = False
    must_add_bos: bool = False  # whatever the file says; early conversions of Gemma 4 say no
    has_bos: bool = True  # False: no start token unless the file names one
    cleans_spaces: bool = True  # detokenizing turns "a ." into "a."
    is_byte_level: bool = True  # False: merges work on characters; ▁ is a space, <0xXX> an unknown byte
    keeps_newline_runs: bool = False  # a run of newlines that is a token stays whole
    strips_before_mask: bool = False  # the <mask> token swallows the white space before it

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return it for the tokenizers library; byte-level ones end by mapping bytes to GPT-2's characters."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(_in_unicode_15(split)), "isolated") for split in self.splits
        ]
        if self.is_byte_level:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


def pre_tokenizer_named(name: str, where: str) -> PreTokenizer:
    """Look up a `tokenizer.ggml.pre`; raises UnsupportedError that lists the known names."""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    known = ", ".join(sorted(filter(None, PRE_TOKENIZERS)))
    raise UnsupportedError(f"{where}: pre-tokenizer {name!r:.80} is not known; known are: {known}")


def _in_unicode_15(split: str) -> str:
    r"""Restrict \p{L} and its like to the characters that Unicode 15.1 has."""
    for letter in "LMNPS":
        split = split.replace(rf"\p{{{letter}}}", rf"[\p{{{letter}}}&&[^{_ADDED_IN_UNICODE_16}]]")
    return split


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _cl100k(
    letters: str = r"\p{L}+",
    numbers: str = r"\p{N}",
    others: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    *,
    contractions: str = _CONTRACTIONS,
    newlines: str = r"\s*[\r\n]+",
    spaces: str = _SPACES,
) -> str:
    """The shape that OpenAI's cl100k gave and most vocabularies since have varied."""
    start = f"{contractions}|" if contractions else ""
    return rf"{start}[^\r\n\p{{L}}\p{{N}}]?{letters}|{numbers}|{others}|{newlines}|{spaces}"


def _o200k(words: str, numbers: str = r"\p{N}{1,3}", ends: str = r"\r\n/") -> str:
    """The shape of OpenAI's o200k: a word is a whole alternative of its own, with its contraction."""
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[{ends}]*|\s*[\r\n]+|{_SPACES}"


def _cased_words(letters: str, contractions: str = f"{_CONTRACTIONS}?") -> str:
    """Words that break where lower case turns upper; letters beyond ASCII count as both."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    return f"{start}{upper}*{lower}+{contractions}|{start}{upper}+{lower}*{contractions}"


def _words(letters: str) -> str:
    """Words that do not break at a change of case."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+{_CONTRACTIONS}?"


def _deepseek(others: str = r" ?[\p{P}\p{S}]+[\r\n]*", newlines: str = r"\s*[\r\n]+") -> str:
    """The last step of DeepSeek-V3: ASCII punctuation sticks to the ASCII letters behind it."""
    word = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{word}|{others}|{newlines}|{_SPACES}"


_LLAMA3 = _cl100k(numbers=r"\p{N}{1,3}")
_KANA_AND_HAN = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
    r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
# scripts that Arcee's AFMoE keeps apart: Han, kana, Thai, Lao, Khmer, Myanmar, Hangul
_AFMOE_SCRIPTS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
# Hangul and its letters, full-width punctuation, Bopomofo, Han with kana: each a piece of its own
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}"
    r"\x{FE30}-\x{FE4F}]+"
    rf"|[\x{{3105}}-\x{{312F}}]+|{_KANA_AND_HAN}"
)
# alphabets with case, as DeepSeek-LLM's tokenizer.json lists them
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}"
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}"
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
_DEEPSEEK_EAST_ASIA = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&[^\s]]+"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
# Digits in threes, from the right; what comes before a number stays with its first one to three digits. In linear
# steps: text up to the end of a number; its first digits; threes from the start of what is left.
_DIGITS_FROM_THE_RIGHT = (
    r"[^\p{N}]*+(?:\p{N}++|\z)",
    r"\A[^\p{N}]*+(?:\p{N}{1,2}|\p{N}{3})(?=(?:\p{N}{3})*\z)",
    r"\G\p{N}{3}",
)

# the names that share a rule; the first is the one that gave it
_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v1-en gigachat a.x-4.0 mellum modern-bert roberta-bpe exaone4 mpt olmo jais",
        PreTokenizer((_GPT2,)),
    ),
    ("jina-v2-es jina-v2-de jina-v2-code", PreTokenizer((_GPT2,), strips_before_mask=True)),
    ("trillion granite-docling", PreTokenizer((_GPT2,), cleans_spaces=False)),
    ("starcoder refact codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("smollm command-r", PreTokenizer((r"\p{N}", _GPT2), cleans_spaces=False)),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("chatglm-bpe glm4 glm5", PreTokenizer((_LLAMA3,), has_bos=False)),
    (
        "jais-2",
        PreTokenizer(
            (
                _cl100k(
                    numbers=r"\p{N}{1,3}",
                    spaces="|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s",
                ),
            )
        ),
    ),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", _cl100k(numbers=r"\p{N}+")), ignores_merges=True),
    ),
    ("stablelm2 megrez", PreTokenizer((_cl100k(),))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan grok-2 solar-open",
        PreTokenizer((_cl100k(),), cleans_spaces=False),
    ),
    (
        "qwen35",
        PreTokenizer(
            (_cl100k(letters=r"[\p{L}\p{M}]+", others=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),),
            cleans_spaces=False,
        ),
    ),
    ("ufakzeka", PreTokenizer((_cl100k(contractions=""),), cleans_spaces=False)),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _cl100k()), cleans_spaces=False)),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((_cl100k(newlines=r"\s*[\r\n]"),), cleans_spaces=False),
    ),
    ("seed-coder", PreTokenizer((_cl100k(others=r" ?[^\s\p{L}\p{N}\r\n]+"),), cleans_spaces=False)),
    (
        "exaone-moe",
        PreTokenizer(
            (
                _cl100k(
                    letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    others=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    newlines=r"\s*[\r\n]",
                ),
            )
        ),
    ),
    (
        "k2-horizon",
        PreTokenizer(
            (_cl100k(letters=r"[\p{L}\p{M}\x{200C}\x{200D}]+", numbers=r"\p{N}{1,3}"),), cleans_spaces=False
        ),
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer((_o200k(_cased_words(r"\p{L}")),), cleans_spaces=False),
    ),
    (
        "tekken",
        PreTokenizer(
            (_o200k(_cased_words(r"\p{L}", contractions=""), numbers=r"\p{N}"),),
            ignores_merges=True,
            adds_bos=True,
            cleans_spaces=False,
        ),
    ),
    (
        "granite-embed-multi-97m",
        PreTokenizer((_o200k(_cased_words(r"\p{L}\p{M}")),), ignores_merges=True, cleans_spaces=False),
    ),
    (
        "tiny_aya cohere2moe",
        PreTokenizer((*_DIGITS_FROM_THE_RIGHT, _o200k(_words(r"[\p{L}\p{M}]"))), cleans_spaces=False),
    ),
    (
        "youtu",
        PreTokenizer(
            (_YOUTU_SCRIPTS, _o200k(_words(r"[\p{L}\p{M}]"), numbers=r"\p{N}")),
            ignores_merges=True,
            cleans_spaces=False,
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (rf"[{_HAN}]+|" + _o200k(_words(rf"[\p{{L}}&&[^{_HAN}]]"), ends=r"\r\n"),), cleans_spaces=False
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
                r"\s+\z",
                _DEEPSEEK_EAST_ASIA,
                r"\p{N}+",
            ),
            cleans_spaces=False,
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST_ASIA, r"\p{N}"), cleans_spaces=False
        ),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _deepseek()), cleans_spaces=False),
    ),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _KANA_AND_HAN,
                _deepseek(others=r" ?[\p{P}\p{S}]+", newlines=r"[\r\n]"),
                r"\p{N}",
            ),
            cleans_spaces=False,
        ),
    ),
    ("afmoe", PreTokenizer((*_DIGITS_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _deepseek()), cleans_spaces=False)),
    # quadratic in the length of one number, and nothing else
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"), cleans_spaces=False)),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
            cleans_spaces=False,
        ),
    ),
    ("bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("poro-chat", PreTokenizer((_BLOOM,), cleans_spaces=False)),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"), cleans_spaces=False)),
    (
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((r"[^\n]+|\n+",), is_byte_level=False, must_add_bos=True, keeps_newline_runs=True),
    ),
    ("mmbert", PreTokenizer((r"[^\n]+|\n+",), is_byte_level=False)),
    ("sarvam-moe", PreTokenizer((r"[^\n]+|\n+",), is_byte_level=False, cleans_spaces=False)),
)

# a GGUF without the key means "default"
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre_tokenizer for names, pre_tokenizer in _GROUPS for name in names.split()
}
