"""Read the tokenizer of a Hugging Face folder as a GGUF vocabulary.

| files | kind | becomes model | module |
|---|---|---|---|
| tokenizer.json; tekken.json; vocab.json with merges.txt | byte-level BPE (Llama 3) | gpt2 | bpe.py, other_files.py |
| tokenizer.json, tokenizer.model | BPE with ▁ and byte fallback (Llama 2, Gemma) | llama, gemma4 | pieces.py, bpe.py |
| tokenizer.json, vocab.txt | WordPiece (BERT) | bert | wordpiece.py |
| tokenizer.json, tokenizer.model, spiece.model, sentencepiece.bpe.model | unigram (T5, XLM-RoBERTa) | t5 | unigram.py |

tokenizer.json takes precedence. Ids without a token, up to the rows of the embedding, become unused tokens `[PADn]`. A
word splitting that llama.cpp does not support is rejected here, before a conversion does any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, printable
from polyquant.storage import strict_json
from polyquant.storage.source import Source
from polyquant.storage.strict_json import typed
from polyquant.tokenizers import bpe, families, other_files, pieces, sentencepiece, special_tokens, unigram, wordpiece
from polyquant.tokenizers.families import Family
from polyquant.tokenizers.special_tokens import Special
from polyquant.tokenizers.token_table import Added, lay_out, read_added, read_merges, read_vocab
from polyquant.tokenizers.vocabulary import Vocabulary

__all__ = ["chat_templates", "from_files", "settings_of"]

_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_MAX_TEMPLATE = 1_000_000


def from_files(
    files: Mapping[str, Path], config: Mapping[str, Any], *, rows: int | None = None, pre: str | None = None
) -> Vocabulary:
    """Return the vocabulary of a folder's small files.

    rows: of the embedding; tokens beyond are dropped with a warning. pre: llama.cpp's name of the pre-tokenizer,
    instead of the equivalent one. Raises InputError, UnsupportedError.
    """
    settings = settings_of(files)
    templates = chat_templates(files, settings)
    family = families.of(config)
    model = next((files[name] for name in _MODELS if name in files), None)
    file, body = None, dict[str, Any]()
    if "tokenizer.json" in files:
        file = files["tokenizer.json"]
        body = typed(strict_json.read(file, strict_json.TOKENIZER), dict, "tokenizer.json", file=file)
    elif other_files.TEKKEN in files:
        file = files[other_files.TEKKEN]
        body, words = other_files.from_tekken(file)
        settings = words | settings
    elif model is None and {other_files.VOCAB, other_files.MERGES} <= set(files):
        file = files[other_files.VOCAB]
        body = other_files.from_merges(files, settings, _json(files, "added_tokens.json"))
    special = special_tokens.read(body, settings)
    texts = special.texts
    if file is not None:
        vocabulary = _from_json(body, file, files, settings, config, special, family, rows, pre)
    elif model is not None:
        vocabulary = _from_model(model, files, settings, config, special, family, rows)
    elif "vocab.txt" in files:
        vocabulary, texts = wordpiece.from_text(
            files["vocab.txt"], settings, special.adds, texts, family, config, pre=pre, rows=rows
        )
    else:
        vocabulary = Vocabulary(
            warnings=("the folder has neither tokenizer.json nor tokenizer.model: no tokenizer is written",)
        )
    if vocabulary.tokens:
        ids = {text: i for i, text in reversed(list(enumerate(vocabulary.tokens)))}
        generation = _json(files, "generation_config.json") if family.turn_end else {}
        named = special_tokens.ids_of(texts, config, generation, family, ids, len(vocabulary.tokens))
        adds = dict(family.default_adds) | dict(vocabulary.adds) | dict(family.adds)
        warnings = (*special.warnings, *vocabulary.warnings)
        vocabulary = replace(vocabulary, special=named, adds=adds, warnings=warnings)
    return replace(vocabulary, templates=templates)


def settings_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return tokenizer_config.json merged over special_tokens_map.json. Raises InputError."""
    return {**_json(files, "special_tokens_map.json"), **_json(files, "tokenizer_config.json")}


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    return typed(strict_json.read(files[name]), dict, name, file=files[name]) if name in files else {}


def _from_json(
    body: Mapping[str, Any],
    file: Path,
    files: Mapping[str, Path],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    special: Special,
    family: Family,
    rows: int | None,
    pre: str | None,
) -> Vocabulary:
    model = typed(body.get("model"), dict, "model", file=file)
    # Files older than the `type` field hold BPE if they have merges.
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind not in ("BPE", "WordPiece", "Unigram"):
        return Vocabulary(warnings=(f"tokenizer type '{printable(kind)}' is not supported: no tokenizer is written",))
    added = read_added(body.get("added_tokens") or [], file)
    if kind == "Unigram":
        return unigram.from_json(body, added, special.adds, config, settings, rows=rows, file=file)
    vocab = typed(model.get("vocab"), dict, "vocab", file=file)
    if kind == "WordPiece":
        table = lay_out(read_vocab(vocab, file), added, rows, file)
        return wordpiece.from_json(body, table, special.adds, family, config, pre=pre, file=file)
    return _bpe(body, file, vocab, added, files, settings, special, family, rows, pre)


def _bpe(
    body: Mapping[str, Any],
    file: Path,
    vocab: Mapping[str, Any],
    added: list[Added],
    files: Mapping[str, Path],
    settings: Mapping[str, Any],
    special: Special,
    family: Family,
    rows: int | None,
    pre: str | None,
) -> Vocabulary:
    model = body["model"]
    merges = read_merges(model.get("merges") or [], file)
    for a, b in merges:
        if a + b not in vocab:
            raise InputError("a merge makes a token that is not in the vocabulary", file=file, found=f"{a} {b}")
    bytes_ = _is_byte_level(body)
    if not bytes_ and not model.get("byte_fallback"):
        return Vocabulary(
            warnings=("this BPE has neither byte-level merges nor byte fallback: no tokenizer is written",)
        )
    table = lay_out(read_vocab(vocab, file), added, rows, file)
    if bytes_:
        return bpe.byte_level(body, table, merges, special.adds, family, pre=pre, file=file)
    if family.raw:
        return bpe.over_text(table, merges, special.adds, family)
    return pieces.from_json(body, table, merges, special.adds, family, settings, files.get("tokenizer.model"))


def _is_byte_level(body: Mapping[str, Any]) -> bool:
    return any(
        node.get("type") == "ByteLevel"
        for key in ("pre_tokenizer", "decoder")
        for node in special_tokens.nodes(body.get(key))
    )


def _from_model(
    file: Path,
    files: Mapping[str, Path],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    special: Special,
    family: Family,
    rows: int | None,
) -> Vocabulary:
    """Return the vocabulary of a SentencePiece file, with added tokens of the JSON files next to it."""
    model = sentencepiece.read(file)
    more = _json(files, "added_tokens.json")
    if model.model_type == sentencepiece.BPE:
        return pieces.from_model(file, model, settings, config, family, more=more, rows=rows)
    if model.model_type == sentencepiece.UNIGRAM:
        return unigram.from_model(file, model, special.adds, config, more, rows)
    return Vocabulary(warnings=(f"{file.name} is neither BPE nor unigram: no tokenizer is written",))


def chat_templates(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name; `default` is the unnamed one. Raises InputError."""
    templates = settings.get("chat_template")
    if templates is None and "chat_template.jinja" in files:
        templates = _text(files["chat_template.jinja"])
    if templates is None:
        templates = _json(files, "chat_template.json").get("chat_template")
    if isinstance(templates, str):
        templates = [{"name": "default", "template": templates}]
    out = {}
    for entry in templates if isinstance(templates, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            out[entry["name"]] = entry["template"]
    return out


def _text(path: Path) -> str:
    source = Source(path)
    try:
        if source.size > _MAX_TEMPLATE:
            raise InputError(
                "chat template is too large", file=path, expected=f"at most {_MAX_TEMPLATE}", found=source.size
            )
        return bytes(source.pread(0, source.size)).decode()
    except UnicodeDecodeError as e:
        raise InputError(f"chat template is not UTF-8 (byte {e.start})", file=path) from None
    finally:
        source.close()
