"""Text <-> token ids, with the `tokenizers` package (extra `run`).

The tokenizer.json of a Hugging Face folder is used unchanged, for any kind. The tokenizer of a GGUF file, or of a
tokenizer.model, is first converted to tokenizer.json (writing.py); kinds that cannot be converted are rejected, never
guessed.

BOS and EOS around the input follow the file. In a folder, add_bos_token and add_eos_token of tokenizer_config.json
replace the post-processor, as in transformers; in a GGUF file, llama.cpp's defaults apply to missing keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.no_collection import no_collection
from polyquant.storage import strict_json
from polyquant.storage.source import Source
from polyquant.tokenizers import engine, pretokenizers, vocabulary
from polyquant.tokenizers import writing as tokenizer_files
from polyquant.tokenizers.reading import chat_templates, from_files, settings_of
from polyquant.tokenizers.vocabulary import Vocabulary
from polyquant.types import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

__all__ = ["TextStream", "Tokenizer", "open_tokenizer"]

_ALONE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "tekken.json", "merges.txt")
_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>",
    "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[",
)  # fmt: skip
"""Control tokens that end an answer regardless of the file's eos entry; most of llama.cpp's list."""
_MESSAGE_END = "<|end|>"
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""If both tokens of a pair exist, `<|end|>` ends a message but not the answer (gpt-oss, Solar Open)."""
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe.

    special: ids by kind (bos, eos, eot, eom, unk, sep, pad, cls, mask). ends: ids that end generation. around: ids
    added before and after the input; None: by the post-processor. templates: chat templates by name, `default` is the
    unnamed one; never rendered here.
    """

    def __init__(
        self,
        core: Core,
        *,
        special: Mapping[str, int],
        ends: Iterable[int],
        around: tuple[Sequence[int], Sequence[int]] | None,
        templates: Mapping[str, str],
        file: object = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._core, self._lock = core, Lock()
        self.special, self.templates, self.file, self.notes = dict(special), dict(templates), file, tuple(notes)
        self._around = around
        self._anchor: list[int] | None = None
        self._skipped = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        # Ids added around the input have no text either, even if the table does not mark them special (ChatGLM's
        # `sop`).
        self._hidden = {i for side in around or () for i in side} - self._skipped
        turn_ends = {text: i for text in _TURN_ENDS if (i := core.token_to_id(text)) is not None and i in self._skipped}
        if any(pair <= set(turn_ends) for pair in _HARMONY):
            turn_ends.pop(_MESSAGE_END, None)
        self.ends = frozenset(ends) | set(turn_ends.values())

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a string.

        add_special: add BOS and EOS as the file specifies. parse_special: `<|eot_id|>` in the input is that token, not
        its letters. Raises InputError, also for a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise InputError(f"the input text is not valid Unicode (character {problem.start})") from None
        before, after = self._around if add_special and self._around is not None else ((), ())
        with self._lock:  # the switch is global to the tokenizer
            self._core.encode_special_tokens = not parse_special
            ids: list[int] = engine.guarded(
                lambda: self._core.encode(text, add_special_tokens=add_special and self._around is None).ids,
                "the tokenizer fails on this input",
                self.file,
            )
        return [*before, *ids, *after]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD.

        Ids beyond the vocabulary (padding rows) have no text.
        """
        shown = [i for i in ids if i not in self._hidden] if skip_special and self._hidden else list(ids)
        text: str = self._core.decode(shown, skip_special_tokens=skip_special)
        return text

    def piece(self, token: int) -> str:
        """Return the text of one token inside a text: with its leading space, and for control tokens as well."""
        if self._anchor is None:  # decoders drop a space at the beginning, so another token precedes
            self._anchor = self.encode("a", add_special=False)
        before = self._core.decode(self._anchor)
        text: str = self._core.decode([*self._anchor, token], skip_special_tokens=False)
        return text[len(before) :]

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Return a decoder for incremental ids."""
        return TextStream(self, skip_special)

    def text_of(self, kind: str) -> str | None:
        """Return the text of a special token, e.g. `bos`."""
        text: str | None = self._core.id_to_token(self.special[kind]) if kind in self.special else None
        return text

    def id_of(self, token: str) -> int | None:
        """Return the id of one token as the vocabulary spells it."""
        id_: int | None = self._core.token_to_id(token)
        return id_

    def tokens(self) -> dict[int, str]:
        """Return the whole table, including added tokens: id -> the token as the vocabulary spells it."""
        return {i: token for token, i in self._core.get_vocab(with_added_tokens=True).items()}

    def is_special(self, token: int) -> bool:
        """True for a control token, which decoding omits."""
        return token in self._skipped or token in self._hidden

    def to_json(self) -> str:
        """Return the tokenizer as a tokenizer.json."""
        return str(self._core.to_str())

    @property
    def size(self) -> int:
        """The number of tokens, including added ones; the embedding may have more rows."""
        return int(self._core.get_vocab_size(with_added_tokens=True))


class TextStream:
    """Incremental decoding: the text completed by each id.

    A character split over several tokens comes with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # Decoders treat the start of the input specially (SentencePiece drops one space), so preceding ids are decoded
        # too.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that is final now."""
        if self._skip and self._tokenizer.is_special(token):
            return ""
        self._held.append(token)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):  # empty, or possibly an incomplete character
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return the remaining text: bytes of an incomplete character."""
        text = self._pending() if self._held else ""
        self._context, self._held = [*self._context, *self._held], []
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special=self._skip) if self._context else ""
        return self._tokenizer.decode(self._context + self._held, skip_special=self._skip)[len(before) :]


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a checkpoint.

    Raises UnsupportedError if there is none or it is not supported, InputError if it is invalid.
    """
    if checkpoint.naming != "gguf" and "tokenizer.json" in checkpoint.files:
        return _from_folder(checkpoint)
    if checkpoint.naming == "gguf":
        vocab = vocabulary.from_metadata(checkpoint.metadata, file=checkpoint.path)
    elif any(name in checkpoint.files for name in _ALONE):
        vocab = from_files(checkpoint.files, checkpoint.config)
    else:
        raise _absent(checkpoint.path, "there is neither tokenizer.json nor tokenizer.model next to the weights")
    return _from_vocabulary(vocab, checkpoint)


def _absent(file: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"no usable tokenizer: {why}",
        file=file,
        hint="pass token ids instead of text, from Python: model.generate([1, 2, 3])",
    )


def _from_vocabulary(vocab: Vocabulary, checkpoint: Checkpoint) -> Tokenizer:
    if not vocab.tokens:
        raise _absent(checkpoint.path, (vocab.warnings[0] if vocab.warnings else "no tokens").rpartition(":")[0])
    if vocab.model == "gpt2" and pretokenizers.kind_of(vocab.pre) is None:
        raise _absent(checkpoint.path, f"pre-tokenizer '{printable(vocab.pre)}' is unknown")
    notes: list[str] = []
    body = tokenizer_files.document(vocab, notes)
    ends = {vocab.special[k] for k in ("eos", "eot", "eom") if k in vocab.special}
    return Tokenizer(
        engine.guarded(lambda: _assembled(body), "the tokenizer cannot be used", checkpoint.path),
        special=vocab.special,
        ends=ends | _ends_of_folder(checkpoint),
        around=(vocab.prefix, ()) if vocab.prefix else None,
        templates=vocab.templates,
        file=checkpoint.path,
        notes=(*vocab.warnings, *notes),
    )


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    file = checkpoint.files["tokenizer.json"]
    core = _core(_bytes(file), file)
    settings = settings_of(checkpoint.files)
    special = {k: i for k in _KINDS if (i := _special_id(core, settings, checkpoint.config, k)) is not None}
    adds = {k: v for k in ("bos", "eos") if isinstance(v := settings.get(f"add_{k}_token"), bool)}
    if (
        not adds
        and str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer")
        and core.post_processor is None
    ):
        adds = {"bos": True}  # the class adds one by default

    def one(kind: str) -> list[int]:
        return [special[kind]] if adds.get(kind, False) and kind in special else []

    ends = _ends_of_folder(checkpoint) | ({special["eos"]} if "eos" in special else set())
    return Tokenizer(
        core,
        special=special,
        ends=ends,
        around=(one("bos"), one("eos")) if adds else None,
        templates=chat_templates(checkpoint.files, settings),
        file=file,
    )


def _special_id(core: Core, settings: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> int | None:
    """Return the id from the tokenizer, or from config.json."""
    entry = settings.get(f"{kind}_token")
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    token_id: int | None = core.token_to_id(text) if isinstance(text, str) else None
    declared = config.get(f"{kind}_token_id")
    if (
        token_id is None
        and isinstance(declared, int)
        and not isinstance(declared, bool)
        and 0 <= declared < core.get_vocab_size()
    ):
        token_id = declared
    return token_id


def _ends_of_folder(checkpoint: Checkpoint) -> set[int]:
    """Return eos_token_id of generation_config.json and config.json: one id or several."""
    ids: set[int] = set()
    path = checkpoint.files.get("generation_config.json")
    generation = strict_json.typed(strict_json.read(path), dict, path.name, file=path) if path is not None else {}
    for config in (generation, checkpoint.config):
        declared = config.get("eos_token_id")
        for i in declared if isinstance(declared, list) else [declared]:
            if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                ids.add(i)
    return ids


def _bytes(path: Path) -> bytes:
    source = Source(path)
    try:
        limit = strict_json.TOKENIZER.nbytes
        if source.size > limit:
            raise InputError("tokenizer.json is too large", file=path, expected=f"at most {limit}", found=source.size)
        return bytes(source.pread(0, source.size))
    finally:
        source.close()


def _core(raw: bytes, file: object) -> Core:
    package = engine.package()
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise InputError(f"tokenizer.json is not UTF-8 (byte {e.start})", file=file) from None
    _check_merges(raw, text, file)
    core: Core = engine.guarded(lambda: package.Tokenizer.from_str(text), "tokenizer.json cannot be used", file)
    core.no_truncation()
    core.no_padding()
    return core


def _check_merges(raw: bytes, text: str, file: object) -> None:
    """Raise InputError for a BPE with a merge that makes the package (0.23) print a traceback or end the process.

    The package writes the result of a merge into a buffer as long as the longest token, and cuts as many bytes off the
    second part as continuing_subword_prefix has. Everything else that is wrong in the file has an error of the package.
    """
    strict_json.check_values(raw, strict_json.TOKENIZER, file=file)
    try:
        with no_collection():
            body = json.loads(text)  # takes a third of the time of strict_json.parse
            model = body["model"]
            merges, prefix = model["merges"], model.get("continuing_subword_prefix") or ""
            tokens = model["vocab"].keys()
            longest = max((len(token.encode()) for token in tokens), default=0) + len(prefix.encode())
            if not prefix:  # most files: look only at merges that are too long, the space aside
                merges = [m for m in merges if len((m if isinstance(m, str) else " ".join(m)).encode()) > longest + 1]
            pairs = [m.split(" ") if isinstance(m, str) else m for m in merges]
            wrong = next((second for _, second in pairs if not second.startswith(prefix)), None)
            long = next((" ".join(pair) for pair in pairs if len("".join(pair).encode()) > longest), None)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return
    if wrong is not None:
        raise InputError(
            "a merge contradicts continuing_subword_prefix",
            file=file,
            expected=f"a second part that starts with {printable(prefix)!r}",
            found=printable(wrong),
        )
    if long is not None:
        raise InputError(
            "tokenizer.json merges to text that is not in the vocabulary", file=file, found=printable(long)
        )


def _assembled(body: Mapping[str, Any]) -> Core:
    """Return the result of from_str for a tokenizer.json in half the time: large lists are passed without
    serialization."""
    package = engine.package()
    core: Core = package.Tokenizer(_model(body["model"]))
    for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if body[stage] is not None:
            setattr(core, stage, engine.stage(stage, body[stage]))
    # Two calls: each rebuilds the search for all of them. Their ids are those of the vocabulary.
    added = [package.AddedToken(**{k: v for k, v in token.items() if k != "id"}) for token in body["added_tokens"]]
    core.add_special_tokens([token for token in added if token.special])
    core.add_tokens([token for token in added if not token.special])
    return core


def _model(description: Mapping[str, Any]) -> Any:
    """Return the `model` of a tokenizer.json."""
    models = engine.package().models
    model = {k: v for k, v in description.items() if k != "type" and v is not None}
    vocab = model.pop("vocab")
    if description["type"] == "Unigram":
        return models.Unigram([(text, score) for text, score in vocab], **model)
    if description["type"] == "WordPiece":
        return models.WordPiece(vocab, **model)
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in model.pop("merges") for cut in (merge.find(" ", 1),)]
    return models.BPE(vocab, pairs, **model)
