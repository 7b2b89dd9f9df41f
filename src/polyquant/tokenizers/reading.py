"""The tokenizer of a Hugging Face folder -> the words of GGUF.

Byte-level BPE (Llama 3, Qwen, GPT-2, ...) keeps its merges. A BPE with `▁` for spaces and bytes as fallback (Llama 2, Mistral) becomes
model `llama`: pieces with scores, from `tokenizer.model` where it agrees with tokenizer.json, else from the rank of the merge that makes
the piece. Ids up to the rows of the embedding that no token has are filled as `[PADn]`, unused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, printable
from polyquant.storage import strict_json
from polyquant.storage.source import Source
from polyquant.storage.strict_json import typed
from polyquant.tokenizers import chatglm as chatglm_tokens
from polyquant.tokenizers import pretokenizers, sentencepiece
from polyquant.tokenizers.token_table import Added, Table, lay_out, read_added, read_merges, read_vocab
from polyquant.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Vocabulary

__all__ = ["chat_templates", "from_files", "settings_of"]

_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_MODEL = 64_000_000
_MAX_TEMPLATE = 1_000_000
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0


def from_files(files: Mapping[str, Path], config: Mapping[str, Any], *, rows: int | None = None) -> Vocabulary:
    """The vocabulary of a folder's small files. rows: of the embedding; tokens beyond are dropped with a warning. Raises InputError."""
    settings = settings_of(files)
    templates = chat_templates(files, settings)
    if "tokenizer.json" in files:
        body = typed(strict_json.read(files["tokenizer.json"], strict_json.TOKENIZER), dict, "tokenizer.json")
        found = _from_json(body, files, settings, rows)
    elif "tokenizer.model" in files:
        found = _from_sentencepiece(files, settings, config, rows)
    else:
        found = Vocabulary(
            warnings=("the folder has neither tokenizer.json nor tokenizer.model: no tokenizer is written",)
        )
    if found.tokens:
        ids = {text: i for i, text in reversed(list(enumerate(found.tokens)))}
        found = replace(found, special=_special(settings, config, ids, len(found.tokens)))
    return replace(found, templates=templates)


def settings_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json. Raises InputError."""
    return {**_json(files, "special_tokens_map.json"), **_json(files, "tokenizer_config.json")}


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    return typed(strict_json.read(files[name]), dict, name, file=files[name]) if name in files else {}


# ---------------------------------------------------------------- tokenizer.json


def _from_json(
    body: Mapping[str, Any], files: Mapping[str, Path], settings: Mapping[str, Any], rows: int | None
) -> Vocabulary:
    file = files["tokenizer.json"]
    model = typed(body.get("model"), dict, "model", file=file)
    # Files older than the `type` field hold BPE if they hold merges.
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind != "BPE":
        return Vocabulary(
            warnings=(f"tokenizer type '{printable(kind)}' has no counterpart here: no tokenizer is written",)
        )
    added = read_added(body.get("added_tokens") or [], file)
    vocab = typed(model.get("vocab"), dict, "vocab", file=file)
    merges = read_merges(model.get("merges") or [], file)
    for a, b in merges:
        if a + b not in vocab:
            raise InputError("a merge makes a token that the vocabulary lacks", file=file, found=f"{a} {b}")
    if _is_byte_level(body):
        table = lay_out(read_vocab(vocab, file), added, rows, file)
        return _byte_level(body, model, table, merges, settings)
    if not model.get("byte_fallback"):
        return Vocabulary(warnings=("this BPE works neither on bytes nor with byte fallback: no tokenizer is written",))
    table = lay_out(read_vocab(vocab, file), added, rows, file)
    return _with_scores(body, model, table, merges, files, settings)


def _is_byte_level(body: Mapping[str, Any]) -> bool:
    return any(
        node.get("type") == "ByteLevel" for key in ("pre_tokenizer", "decoder") for node in _nodes(body.get(key))
    )


def _nodes(node: Any) -> Iterable[Mapping[str, Any]]:
    """A pipeline stage and the stages inside it."""
    if isinstance(node, Mapping):
        yield node
        for key in ("pretokenizers", "normalizers", "decoders", "processors"):
            inner = node.get(key)
            for child in inner if isinstance(inner, list) else ():
                yield from _nodes(child)


def _byte_level(
    body: Mapping[str, Any],
    model: Mapping[str, Any],
    table: Table,
    merges: list[tuple[str, str]],
    settings: Mapping[str, Any],
) -> Vocabulary:
    warnings = list(table.warnings)
    kind = pretokenizers.recognise(body.get("pre_tokenizer"), ignore_merges=bool(model.get("ignore_merges")))
    if kind is None:
        warnings.append(
            "llama.cpp has no name that we know for this pre-tokenizer: 'default' is written, words may be cut differently"
        )
        kind = pretokenizers.kind_of("default")
    assert kind is not None
    adds, doubts = _adds(body, settings)
    if kind.add_bos:
        adds = {"bos": False, **adds}  # else llama.cpp would put one in front
    return Vocabulary(
        model="gpt2",
        pre=kind.names[0],
        tokens=table.tokens,
        types=table.types,
        # A space cannot stand inside a piece of "left right"; U+0120 is the byte-level alphabet's space.
        merges=[f"{a.replace(' ', 'Ġ')} {b.replace(' ', 'Ġ')}" for a, b in merges],
        adds=adds,
        warnings=(*warnings, *doubts),
    )


def _adds(body: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[dict[str, bool], list[str]]:
    """Which of bos and eos the post-processor puts around a text; tokenizer_config.json overrides."""
    adds: dict[str, bool] = {}
    warnings = []
    for node in _nodes(body.get("post_processor")):
        single = node.get("single")
        if node.get("type") != "TemplateProcessing" or not isinstance(single, list):
            continue
        names = [_special_name(item) for item in single]
        where = names.index(None) if None in names else len(names)
        before, after = names[:where], names[where + 1 :]
        for kind, found in (("bos", before), ("eos", after)):
            if found:
                adds[kind] = found == [_content(settings.get(f"{kind}_token"))]
                if not adds[kind]:
                    warnings.append(
                        f"the post-processor adds {printable(found)}, which is not the {kind} token: GGUF cannot say this"
                    )
    for kind in ("bos", "eos", "sep"):
        if isinstance(said := settings.get(f"add_{kind}_token"), bool):
            adds[kind] = said
    return adds, warnings


def _special_name(item: Any) -> str | None:
    inner = item.get("SpecialToken") if isinstance(item, Mapping) else None
    name = inner.get("id") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _content(entry: Any) -> str | None:
    """A special token is written as text or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


# ---------------------------------------------------------------- pieces with scores


def _with_scores(
    body: Mapping[str, Any],
    model: Mapping[str, Any],
    table: Table,
    merges: list[tuple[str, str]],
    files: Mapping[str, Path],
    settings: Mapping[str, Any],
) -> Vocabulary:
    types = [
        BYTE if t == NORMAL and _BYTE_PIECE.fullmatch(x) else t for t, x in zip(table.types, table.tokens, strict=True)
    ]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in table.ids:
        types[table.ids[unknown]] = UNKNOWN
    warnings = list(table.warnings)
    normal = {x for x, t in zip(table.tokens, types, strict=True) if t == NORMAL}
    scores = _scores_of_model(files, table, types)
    if scores is None:
        rank: dict[str, int] = {}
        for i, (a, b) in enumerate(merges):
            rank.setdefault(a + b, i)
        known = set(merges)
        if not all(pair in known for piece in normal for pair in _halves(piece, normal)):
            warnings.append(
                "some merges are missing that the vocabulary allows: llama.cpp merges by score alone and may differ"
            )
        scores = _scores(table.tokens, types, rank)
    adds, doubts = _adds(body, settings)
    if not str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer"):
        adds = {"bos": False, **adds}  # that class puts one in front by itself, as llama.cpp does
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=table.tokens,
        types=types,
        scores=scores,
        adds=adds,
        space_prefix=_space_prefix(body, settings),
        warnings=(*warnings, *doubts),
    )


def _halves(piece: str, known: set[str]) -> Iterable[tuple[str, str]]:
    """Every cut of a piece into two known ones."""
    for i in range(1, min(len(piece), 256)):
        if piece[:i] in known and piece[i:] in known:
            yield piece[:i], piece[i:]


def _scores(tokens: list[str], types: list[int], rank: Mapping[str, int]) -> list[float]:
    """Higher merges first, as in SentencePiece: minus the rank of the first merge that makes the piece."""
    last = float(len(rank))
    fixed = {UNUSED: _UNUSED_SCORE - last, CONTROL: _ADDED_SCORE, USER: _ADDED_SCORE, BYTE: 0.0, UNKNOWN: 0.0}
    return [fixed.get(t, -float(rank.get(x, last))) for x, t in zip(tokens, types, strict=True)]


def _scores_of_model(files: Mapping[str, Path], table: Table, types: list[int]) -> list[float] | None:
    """The scores of tokenizer.model if it has the same pieces under the same ids: fine-tuned folders often keep a stale one."""
    if "tokenizer.model" not in files:
        return None
    pieces = _read_model(files["tokenizer.model"]).pieces
    scores = _scores(table.tokens, types, {})
    for i, (token, kind) in enumerate(zip(table.tokens, types, strict=True)):
        if kind in (NORMAL, BYTE, UNKNOWN):
            if i >= len(pieces) or pieces[i][0] != token:
                return None
            scores[i] = pieces[i][1]
    return scores


def _space_prefix(body: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a text that starts a sequence is given a leading space."""
    if isinstance(said := settings.get("add_prefix_space"), bool):
        return said
    nodes = [n for key in ("normalizer", "pre_tokenizer") for n in _nodes(body.get(key))]
    return any(
        n.get("type") == "Prepend"
        or (
            n.get("type") == "Metaspace"
            and (n.get("prepend_scheme") in ("always", "first") or n.get("add_prefix_space") is True)
        )
        for n in nodes
    )


def _read_model(path: Path) -> sentencepiece.Model:
    source = Source(path)
    try:
        if source.size > _MAX_MODEL:
            raise InputError(
                "tokenizer.model is too large", file=path, expected=f"at most {_MAX_MODEL}", found=source.size
            )
        return sentencepiece.parse(bytes(source.pread(0, source.size)), file=path)
    finally:
        source.close()


def _from_sentencepiece(
    files: Mapping[str, Path], settings: Mapping[str, Any], config: Mapping[str, Any], rows: int | None
) -> Vocabulary:
    """tokenizer.model alone, with the added tokens of the JSON files beside it, or of ChatGLM's code."""
    file = files["tokenizer.model"]
    model = _read_model(file)
    if model.model_type != sentencepiece.BPE:
        return Vocabulary(warnings=("tokenizer.model is no BPE: no tokenizer is written",))
    added = [Added(strict_json.integer(i, "id of an added token", file=file), text, False)
             for text, i in _json(files, "added_tokens.json").items()]  # fmt: skip
    decoder = settings.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        text = _content(entry)
        # The first ids repeat the pieces of the model, with their types.
        if text is not None and key.isdecimal() and len(key) < 10 and int(key) >= len(model.pieces):
            added.append(Added(int(key), text, bool(entry.get("special"))))
    items = [(text, i) for i, (text, _, _) in enumerate(model.pieces)]
    chatglm = config.get("model_type") == chatglm_tokens.MODEL_TYPE
    if chatglm:
        taken = {a.id for a in added}
        words = enumerate(chatglm_tokens.SPECIAL, start=len(items))
        added += [Added(i, text, text.startswith("[")) for i, text in words if i not in taken]
    size = rows if rows is not None else max([len(items), *(a.id + 1 for a in added)])
    table = lay_out(items, added, size, file)
    types, scores = list(table.types), _scores(table.tokens, table.types, {})
    for i, (_, score, kind) in enumerate(model.pieces[:size]):
        types[i], scores[i] = kind, score
    adds = {k: v for k in ("bos", "eos") if isinstance(v := settings.get(f"add_{k}_token"), bool)}
    prefix: tuple[int, ...] = ()
    if chatglm:
        adds = {"bos": False, **adds}  # else llama.cpp would put one in front
        # Letters of ordinary words: found in a text, they would tear it apart.
        types = [
            UNUSED if text in chatglm_tokens.LETTERS else kind for text, kind in zip(table.tokens, types, strict=True)
        ]
        prefix = tuple(table.ids[text] for text in chatglm_tokens.PREFIX if text in table.ids)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=table.tokens,
        types=types,
        scores=scores,
        adds=adds,
        space_prefix=model.add_prefix,
        prefix=prefix,
        warnings=tuple(table.warnings),
    )


# ---------------------------------------------------------------- special tokens and templates


def _special(
    settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], size: int
) -> dict[str, int]:
    """Ids by kind: the tokenizer's word first, then config.json's."""
    out: dict[str, int] = {}
    for kind in _KINDS:
        text = _content(settings.get(f"{kind}_token"))
        if text is not None and text in ids:
            out[kind] = ids[text]
    for kind in _KINDS:
        said = config.get(f"{kind}_token_id")
        if kind not in out and isinstance(said, int) and not isinstance(said, bool) and 0 <= said < size:
            out[kind] = said
    return out


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
