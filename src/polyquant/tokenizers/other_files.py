"""Byte-level BPEs in other files than tokenizer.json, converted to a tokenizer.json.

| file | what |
|---|---|
| tekken.json (Mistral) | `vocab`: tokens as base64 bytes by rank; `special_tokens`; `config`: pattern and counts |
| vocab.json, merges.txt | tokens and merges of transformers' classes before 2020; the class splits words |

tekken.json has ranks and no merges: a token is made of two others whose concatenation has its rank, so every split of a
token into two tokens is a merge, lower ranks first. Special tokens have the first ids, the others follow by rank.

Source: mistral-common's tekken.py; transformers' convert_slow_tokenizer.py.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.storage import strict_json
from polyquant.storage.source import Source
from polyquant.storage.strict_json import typed
from polyquant.tokenizers import pretokenizers, special_tokens
from polyquant.tokenizers.sentencepiece import MAX_TOKENS

__all__ = ["MERGES", "TEKKEN", "VOCAB", "from_merges", "from_tekken", "text"]

TEKKEN, VOCAB, MERGES = "tekken.json", "vocab.json", "merges.txt"
_TEKKEN_SETTINGS = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": True,
    "add_eos_token": False,
}  # fmt: skip
_CLASSES = {
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "RobertaTokenizer": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
}
"""The pre-tokenizer of each class of transformers (with or without the suffix `Fast`)."""
_MAX_TOKEN = 256  # bytes; longer tokens are not split, to bound the cost of malicious files


def from_tekken(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tokenizer.json, settings) of a tekken.json. Raises InputError."""
    body = typed(strict_json.read(file, strict_json.TOKENIZER), dict, TEKKEN, file=file)
    config = typed(body.get("config"), dict, "config", file=file)
    pattern = typed(config.get("pattern"), str, "pattern", file=file)
    special = strict_json.integer(config.get("default_num_special_tokens"), "default_num_special_tokens", file=file)
    size = strict_json.integer(config.get("default_vocab_size"), "default_vocab_size", file=file)
    if not special <= size <= MAX_TOKENS:
        raise InputError("token ids are too large", file=file, expected=f"{special} to {MAX_TOKENS}", found=size)
    ranks: dict[bytes, int] = {}
    for entry in typed(body.get("vocab"), list, "vocab", file=file)[: size - special]:
        try:
            token = b64decode(
                typed(typed(entry, dict, "a token", file=file).get("token_bytes"), str, "token_bytes", file=file),
                validate=True,
            )
        except binascii.Error as e:
            raise InputError(f"token_bytes is not base64: {e}", file=file) from None
        if token in ranks or not token:
            raise InputError("a token is empty or duplicate", file=file, found=token)
        ranks[token] = strict_json.integer(entry.get("rank"), "rank", file=file)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError("the ranks of the tokens are not consecutive", file=file)
    names = [f"<SPECIAL_{i}>" for i in range(special)]
    for i, entry in enumerate(typed(body.get("special_tokens") or [], list, "special_tokens", file=file)[:special]):
        fields = typed(entry, dict, "a special token", file=file)
        names[strict_json.integer(fields.get("rank", i), "rank", file=file) % max(special, 1)] = typed(
            fields.get("token_str"), str, "token_str", file=file
        )
    letters = _alphabet()
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = [
        [spelled[a], spelled[b]] for token in sorted(ranks, key=ranks.__getitem__) for a, b in _cuts(token, ranks)
    ]
    vocab = {name: i for i, name in enumerate(names)} | {spelled[t]: special + rank for t, rank in ranks.items()}
    added = [{"id": i, "content": name, "special": True} for i, name in enumerate(names)]
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _document(vocab, merges, added, [cut, _BYTES], ignore_merges=True), dict(_TEKKEN_SETTINGS)


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _cuts(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every split of a token into two tokens, lower ranks first."""
    if len(token) > _MAX_TOKEN:
        return []
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    return sorted((p for p in pairs if p[0] in ranks and p[1] in ranks), key=lambda p: (ranks[p[0]], ranks[p[1]]))


def _alphabet() -> list[str]:
    """Return the character of each byte: itself if printable, otherwise the next one from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _document(
    vocab: Mapping[str, int],
    merges: list[Any],
    added: list[dict[str, Any]],
    cuts: list[dict[str, Any]],
    *,
    ignore_merges: bool,
) -> dict[str, Any]:
    stage = cuts[0] if len(cuts) == 1 else {"type": "Sequence", "pretokenizers": cuts}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges}
    return {"added_tokens": added, "pre_tokenizer": stage, "decoder": {"type": "ByteLevel"}, "model": model}


def from_merges(files: Mapping[str, Path], settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json equivalent to vocab.json and merges.txt. more: added_tokens.json.

    Raises InputError, UnsupportedError.
    """
    name = str(settings.get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast")
    kind = pretokenizers.kind_of(_CLASSES.get(name, ""))
    if kind is None:
        raise UnsupportedError(
            f"{printable(name)} defines word splitting in its code, not in {VOCAB} and {MERGES}",
            file=files[VOCAB],
            hint="save the tokenizer with transformers first, which writes tokenizer.json",
        )
    vocab = typed(strict_json.read(files[VOCAB], strict_json.TOKENIZER), dict, VOCAB, file=files[VOCAB])
    lines = text(files[MERGES]).split("\n")
    merges = [line for line in lines[lines[0].startswith("#version") :] if line.strip()]
    added = {t: {"id": i, "content": t, "special": False} for t, i in more.items()}
    for i, t, special in special_tokens.listed(settings):
        added[t] = {"id": i, "content": t, "special": special}
    for t in special_tokens.read({}, settings).texts.values():
        if t in vocab or t in added:
            added[t] = {"id": vocab[t] if t in vocab else added[t]["id"], "content": t, "special": True}
    cuts = pretokenizers.to_json(kind)
    return _document(vocab, merges, list(added.values()), [cuts], ignore_merges=False)


def text(file: Path) -> str:
    """Return the content of a text file. Raises InputError."""
    source = Source(file)
    try:
        limit = strict_json.TOKENIZER.nbytes
        if source.size > limit:
            raise InputError(f"{file.name} is too large", file=file, expected=f"at most {limit}", found=source.size)
        return bytes(source.pread(0, source.size)).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise InputError(f"{file.name} is not UTF-8 (byte {e.start})", file=file) from None
    finally:
        source.close()
