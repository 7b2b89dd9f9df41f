"""The tokenizer of a Hugging Face folder -> the words of GGUF.

| files | kind | becomes model | module |
|---|---|---|---|
| tokenizer.json; tekken.json; vocab.json with merges.txt | BPE over bytes (Llama 3, Qwen, GPT-2, ...) | gpt2 | bpe.py, other_files.py |
| tokenizer.json, tokenizer.model | BPE with ▁ for spaces and bytes as fallback (Llama 2, Mistral, Gemma) | llama, of Gemma 4 gemma4 | pieces.py, bpe.py |
| tokenizer.json, vocab.txt | WordPiece (BERT) | bert | wordpiece.py |
| tokenizer.json, tokenizer.model, spiece.model, sentencepiece.bpe.model | unigram (T5, XLM-RoBERTa) | t5 | unigram.py |

tokenizer.json is preferred. Ids up to the rows of the embedding that no token has are filled as `[PADn]`, unused. What llama.cpp cannot
cut as the tokenizer does is refused here, which is before a conversion does any work.
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
    """The vocabulary of a folder's small files. rows: of the embedding; tokens beyond are dropped with a warning. pre: llama.cpp's name of
    the pre-tokenizer, instead of the one that cuts alike. Raises InputError, UnsupportedError."""
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
        found = _from_json(body, file, files, settings, config, special, family, rows, pre)
    elif model is not None:
        found = _from_model(model, files, settings, config, special, family, rows)
    elif "vocab.txt" in files:
        found, texts = wordpiece.from_text(
            files["vocab.txt"], settings, special.adds, texts, family, config, pre=pre, rows=rows
        )
    else:
        found = Vocabulary(
            warnings=("the folder has neither tokenizer.json nor tokenizer.model: no tokenizer is written",)
        )
    if found.tokens:
        ids = {text: i for i, text in reversed(list(enumerate(found.tokens)))}
        generation = _json(files, "generation_config.json") if family.turn_end else {}
        named = special_tokens.ids_of(texts, config, generation, family, ids, len(found.tokens))
        adds = dict(family.default_adds) | dict(found.adds) | dict(family.adds)
        warnings = (*special.warnings, *found.warnings)
        found = replace(found, special=named, adds=adds, warnings=warnings)
    return replace(found, templates=templates)


def settings_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json. Raises InputError."""
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
    # Files older than the `type` field hold BPE if they hold merges.
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind not in ("BPE", "WordPiece", "Unigram"):
        return Vocabulary(
            warnings=(f"tokenizer type '{printable(kind)}' has no counterpart here: no tokenizer is written",)
        )
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
            raise InputError("a merge makes a token that the vocabulary lacks", file=file, found=f"{a} {b}")
    bytes_ = _is_byte_level(body)
    if not bytes_ and not model.get("byte_fallback"):
        return Vocabulary(warnings=("this BPE works neither on bytes nor with byte fallback: no tokenizer is written",))
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
    """A SentencePiece file alone, with the added tokens of the JSON files beside it."""
    model = sentencepiece.read(file)
    more = _json(files, "added_tokens.json")
    if model.model_type == sentencepiece.BPE:
        return pieces.from_model(file, model, settings, config, family, more=more, rows=rows)
    if model.model_type == sentencepiece.UNIGRAM:
        return unigram.from_model(file, model, special.adds, config, more, rows)
    return Vocabulary(warnings=(f"{file.name} is neither BPE nor unigram: no tokenizer is written",))


def chat_templates(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; `default` is the nameless one. Raises InputError."""
    said = settings.get("chat_template")
    if said is None and "chat_template.jinja" in files:
        said = _text(files["chat_template.jinja"])
    if said is None:
        said = _json(files, "chat_template.json").get("chat_template")
    if isinstance(said, str):
        said = [{"name": "default", "template": said}]
    out = {}
    for entry in said if isinstance(said, list) else ():
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
