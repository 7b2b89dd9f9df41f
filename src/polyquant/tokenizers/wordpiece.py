"""BERT's WordPiece between tokenizer files and GGUF (model `bert`).

A word is split into the longest pieces in the vocabulary, from its start; a word that cannot be split is the unknown
token. tokenizer.json and vocab.txt mark pieces inside a word, `##ing`; GGUF marks the first piece, `▁play`; control
tokens are unmarked. Before that, text is cleaned, Chinese characters are separated, letters lose case and accents if
the model specifies it, and words are split at spaces and punctuation: llama.cpp does all of this as BERT does and
supports no alternative.

Source: `preprocess` of llm_tokenizer_wpm_session in llama.cpp's src/llama-vocab.cpp; the phantom space of its
converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyquant.errors import UnsupportedError
from polyquant.tokenizers import recognition
from polyquant.tokenizers.families import Family
from polyquant.tokenizers.other_files import text
from polyquant.tokenizers.special_tokens import nodes
from polyquant.tokenizers.token_table import Added, Table, lay_out
from polyquant.tokenizers.vocabulary import CONTROL, Vocabulary

__all__ = ["from_json", "from_text", "to_json", "to_json_tokens"]

_INSIDE = "##"
_BERT = {"type": "BertPreTokenizer"}
_MAX_WORD = 100
_NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def from_json(
    body: Mapping[str, Any],
    table: Table,
    adds: Mapping[str, bool],
    family: Family,
    config: Mapping[str, Any],
    *,
    pre: str | None,
    file: Path,
) -> Vocabulary:
    """Return the vocabulary of a WordPiece tokenizer.json.

    pre: the name to write, without checking that words are split as in BERT. Raises UnsupportedError.
    """
    node = body.get("pre_tokenizer")
    if pre is None and not recognition.same(node, _BERT, file=file):
        raise UnsupportedError(
            "llama.cpp splits the words of a WordPiece model as BERT does, this pre-tokenizer does not",
            file=file,
            found=node,
            hint="--pre-tokenizer bert-bge (pre_tokenizer= in Python) converts it anyway",
        )
    lowercase, strip_accents, warnings = _normalizer(body)
    inside = body["model"].get("continuing_subword_prefix", _INSIDE)
    return _vocabulary(table, adds, family, config, str(inside), pre, lowercase, strip_accents, warnings)


def from_text(
    file: Path,
    settings: Mapping[str, Any],
    adds: Mapping[str, bool],
    texts: Mapping[str, str],
    family: Family,
    config: Mapping[str, Any],
    *,
    pre: str | None,
    rows: int | None,
) -> tuple[Vocabulary, dict[str, str]]:
    """Return (vocabulary, special tokens by kind) of a vocab.txt with a piece per line.

    texts: the known special tokens by kind. Raises InputError.
    """
    lines = text(file).removesuffix("\n").split("\n")
    ids = {line: i for i, line in enumerate(lines)}
    texts = {k: t for k, t in (_NAMES | dict(texts)).items() if t in ids}
    texts |= {k: texts[other] for k, other in (("bos", "cls"), ("eos", "sep")) if other in texts and k not in texts}
    added = [Added(ids[name], name, True) for name in sorted(set(texts.values()), key=lambda t: ids[t])]
    table = lay_out(ids.items(), added, rows, file)
    lowercase = bool(settings.get("do_lower_case", True))
    accents = settings.get("strip_accents")
    around = {"bos": True, "eos": True, "sep": False, **adds}
    words = _vocabulary(
        table, around, family, config, _INSIDE, pre, lowercase, accents if isinstance(accents, bool) else None, []
    )
    return words, texts


def _vocabulary(
    table: Table,
    adds: Mapping[str, bool],
    family: Family,
    config: Mapping[str, Any],
    inside: str,
    pre: str | None,
    lowercase: bool | None,
    strip_accents: bool | None,
    warnings: list[str],
) -> Vocabulary:
    def phantom(token: str, kind: int) -> str:
        if kind == CONTROL:
            return token
        return token.removeprefix(inside) if token.startswith(inside) else "▁" + token

    segments = config.get("type_vocab_size", 1)
    return Vocabulary(
        model="bert",
        pre=pre or (family.pre or ("bert-bge",))[0],
        tokens=[phantom(token, kind) for token, kind in zip(table.tokens, table.types, strict=True)],
        types=table.types,
        adds=adds,
        segments=segments if isinstance(segments, int) and 0 <= segments < 1 << 16 else 1,
        lowercase=lowercase,
        strip_accents=strip_accents,
        warnings=(*table.warnings, *warnings),
    )


def _normalizer(body: Mapping[str, Any]) -> tuple[bool | None, bool | None, list[str]]:
    """Return (lowercase, strip_accents, warnings); None: not specified."""
    lowercase: bool | None = None
    accents: bool | None = None
    warnings = []
    for node in nodes(body.get("normalizer")):
        kind = node.get("type")
        if kind == "BertNormalizer":
            values = node.get("lowercase"), node.get("strip_accents")
            lowercase, accents = (x if isinstance(x, bool) else None for x in values)
            warnings += [
                f"the normalizer's {key} is off: llama.cpp always applies it, some inputs will differ"
                for key in ("clean_text", "handle_chinese_chars")
                if node.get(key) is False
            ]
        elif kind == "Lowercase":
            lowercase = True
        elif kind == "StripAccents":
            accents = True
    if not any(n.get("type") == "BertNormalizer" for n in nodes(body.get("normalizer"))):
        # Written explicitly, because llama.cpp's defaults are true, and the same as lowercase.
        lowercase, accents = bool(lowercase), bool(accents)
    return lowercase, accents, warnings


# ---------------------------------------------------------------- GGUF -> tokenizer.json: tokens, stages and model


def to_json_tokens(vocabulary: Vocabulary) -> list[str]:
    """Return tokens as in tokenizer.json, with `##` inside words."""
    return [
        token if kind == CONTROL else token[1:] if token.startswith("▁") else _INSIDE + token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def to_json(vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (stages, model) of tokenizer.json."""
    lowercase = vocabulary.lowercase is not False
    accents = vocabulary.strip_accents
    stages = {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": lowercase if accents is None else accents, "lowercase": lowercase},
        "pre_tokenizer": _BERT,
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": _INSIDE, "cleanup": True},
    }  # fmt: skip
    unknown = vocabulary.special.get("unk")
    name = vocabulary.tokens[unknown] if unknown is not None else "[UNK]"
    return stages, {"unk_token": name, "continuing_subword_prefix": _INSIDE, "max_input_chars_per_word": _MAX_WORD}
