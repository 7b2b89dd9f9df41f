"""The special tokens of a Hugging Face folder, and those added around the input.

tokenizer_config.json names them (bos, eos, ...); the post_processor of tokenizer.json lists the added tokens, as a
template of tokens and the sequences A and B. GGUF has an id for each and three switches: add_bos_token, add_eos_token,
add_sep_token (between two sequences).

| in the template | result |
|---|---|
| a token before A that is bos or cls; bos if none is named | add_bos_token |
| a token after A that is eos | add_eos_token |
| one that is not eos | it becomes eos, the previous eos becomes eot |
| A sep B with no token after A in `single`, or A eos sep B | add_sep_token |

Source: SpecialVocab of llama.cpp's gguf-py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyquant.errors import printable
from polyquant.tokenizers.families import Family

__all__ = ["KINDS", "Special", "content", "ids_of", "listed", "nodes", "read"]

KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "eot", "eom")


@dataclass(frozen=True, slots=True)
class Special:
    """texts: by kind. adds: tokens added around the input, by kind (bos, eos, sep)."""

    texts: Mapping[str, str]
    adds: Mapping[str, bool]
    warnings: tuple[str, ...]


def content(entry: Any) -> str | None:
    """Return the text of a special token, given as a string or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def nodes(node: Any) -> Iterable[Mapping[str, Any]]:
    """Yield a pipeline stage and its nested stages."""
    if isinstance(node, Mapping):
        yield node
        for key in ("pretokenizers", "normalizers", "decoders", "processors"):
            inner = node.get(key)
            for child in inner if isinstance(inner, list) else ():
                yield from nodes(child)


def listed(settings: Mapping[str, Any]) -> Iterable[tuple[int, str, bool]]:
    """Yield (id, text, special) of `added_tokens_decoder` in tokenizer_config.json."""
    decoder = settings.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        text = content(entry)
        if text is not None and key.isdecimal() and len(key) < 10:
            yield int(key), text, isinstance(entry, Mapping) and bool(entry.get("special"))


def read(body: Mapping[str, Any], settings: Mapping[str, Any]) -> Special:
    """Return the special tokens of tokenizer_config.json and the post-processor; the former's switches take
    precedence."""
    texts = {k: text for k in KINDS if (text := content(settings.get(f"{k}_token")))}
    if body:
        for kind, other in (("bos", "cls"), ("eos", "sep")):
            if kind not in texts and other in texts:
                texts[kind] = texts[other]
    adds: dict[str, bool] = {}
    warnings: list[str] = []
    for node in nodes(body.get("post_processor")):
        if node.get("type") == "RobertaProcessing":
            adds |= {"bos": True, "eos": True, "sep": True}
            for kind, other in (("cls", "bos"), ("sep", "eos")):
                pair = node.get(kind)
                text = pair[0] if isinstance(pair, list) and pair and isinstance(pair[0], str) else texts.get(other)
                if kind not in texts and text is not None:
                    texts[kind] = text
        elif node.get("type") == "TemplateProcessing":
            _template(node, texts, adds, warnings)
    for kind in ("bos", "eos", "sep"):
        if isinstance(switch := settings.get(f"add_{kind}_token"), bool):
            adds[kind] = switch
    return Special(texts, adds, tuple(warnings))


def _template(node: Mapping[str, Any], texts: dict[str, str], adds: dict[str, bool], warnings: list[str]) -> None:
    single = [_token(item) for item in _items(node, "single")]
    where = single.index(None) if None in single else len(single)
    before, after = single[:where], single[where + 1 :]
    for side, side_tokens in (("starts", before), ("ends", after)):
        if len(side_tokens) > 1:
            warnings.append(f"every input {side} with {printable(side_tokens)}, of which GGUF can store only one token")
    first, last = before[0] if before else None, after[-1] if after else None
    if first is not None:
        texts.setdefault("bos", first)
        adds["bos"] = first in (texts["bos"], texts.get("cls"))
        if not adds["bos"]:
            warnings.append(
                f"the post-processor adds {printable(first)}, which is not the bos token: GGUF cannot express this"
            )
    if last is not None:
        old = texts.get("eos", last)
        if old != last:
            texts["eot" if "eot" not in texts else "eom"] = old
        texts["eos"], adds["eos"] = last, True
    pair = [_token(item) or item for item in _items(node, "pair")]
    if pair and pair[0] == first:
        pair = pair[1:]
    if pair and pair[-1] == last:
        pair = pair[:-1]
    between = [x for x in pair[1:-1] if isinstance(x, str)]
    if between:
        ends = (texts.get("sep"), texts.get("eos"))
        adds["sep"] = (between[0] in ends and last is None) or (len(between) == 2 and between[1] in ends)
        if adds["sep"] and "eos" in texts:
            texts.setdefault("sep", texts["eos"])


def _items(node: Mapping[str, Any], key: str) -> list[Any]:
    items = node.get(key)
    return items if isinstance(items, list) else []


def _token(item: Any) -> str | None:
    """Return the special token of a template item; None for a sequence."""
    inner = item.get("SpecialToken") if isinstance(item, Mapping) else None
    name = inner.get("id") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def ids_of(
    texts: Mapping[str, str],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    family: Family,
    ids: Mapping[str, int],
    size: int,
) -> dict[str, int]:
    """Return ids by kind: from the tokenizer, then config.json, then the family. size: of the vocabulary."""
    out = {kind: ids[texts[kind]] for kind in KINDS if texts.get(kind) in ids}
    inner = config.get("text_config")
    for body in (config, inner if isinstance(inner, Mapping) else {}):
        for kind in KINDS:
            declared: Any = body.get(f"{kind}_token_id")
            if kind not in out and _is_id(declared, size):
                out[kind] = declared
    for kind, text in family.tokens.items():
        if kind not in out and text in ids:
            out[kind] = ids[text]
    ends = generation.get("eos_token_id")
    if family.turn_end and isinstance(ends, list) and len(ends) > 1 and _is_id(ends[0], size):
        out["eot"] = ends[0]
    out |= {kind: config[key] for kind, key in family.ids_in_config.items() if _is_id(config.get(key), size)}
    return out | {kind: i for kind, i in family.ids.items() if i < size}


def _is_id(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size
