"""Text <-> token ids, by the `tokenizers` package (extra `run`).

A Hugging Face folder's own tokenizer.json runs as it is, whatever its kind. The tokenizer of a GGUF file, or of a lone tokenizer.model,
is said in tokenizer.json's words first (writing.py); a kind that cannot be said so is refused, never guessed.

BOS and EOS around a text: as the file says. In a folder, add_bos_token and add_eos_token of tokenizer_config.json take the place of the
post-processor, as in transformers; in a GGUF file llama.cpp's defaults hold where a key is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from polyquant.errors import InputError, UnsupportedError, printable
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
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[",
)  # fmt: skip
"""Control tokens that end an answer whatever the file's eos entry says; most of llama.cpp's list."""
_MESSAGE_END = "<|end|>"
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Where both tokens are there, `<|end|>` ends a message, after which the answer goes on (gpt-oss, Solar Open)."""
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """What one checkpoint says about text. Safe to share between threads.

    special: ids by kind (bos, eos, eot, eom, unk, sep, pad, cls, mask). ends: ids that end a text. around: ids that we
    put before and after a text; None leaves it to the post-processor. templates: chat templates by name, `default` the nameless one; never rendered here.
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
        self._skipped = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        # Ids around a text say nothing either, though the table may not call them special (ChatGLM's `sop`).
        self._hidden = {i for side in around or () for i in side} - self._skipped
        found = {text: i for text in _TURN_ENDS if (i := core.token_to_id(text)) is not None and i in self._skipped}
        if any(pair <= set(found) for pair in _HARMONY):
            found.pop(_MESSAGE_END, None)
        self.ends = frozenset(ends) | set(found.values())

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text. add_special: BOS and EOS around it as the file says. parse_special: `<|eot_id|>` in the text is that token,
        not its letters. Raises InputError."""
        before, after = self._around if add_special and self._around is not None else ((), ())
        with self._lock:  # the switch belongs to the whole tokenizer
            self._core.encode_special_tokens = not parse_special
            ids: list[int] = engine.guarded(
                lambda: self._core.encode(text, add_special_tokens=add_special and self._around is None).ids,
                "the tokenizer fails on this text",
                self.file,
            )
        return [*before, *ids, *after]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Ids beyond the vocabulary (rows that no token has) say nothing."""
        shown = [i for i in ids if i not in self._hidden] if skip_special and self._hidden else list(ids)
        text: str = self._core.decode(shown, skip_special_tokens=skip_special)
        return text

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A decoder that is given one id after the other."""
        return TextStream(self, skip_special)

    def text_of(self, kind: str) -> str | None:
        """The text of a special token, e.g. `bos`."""
        text: str | None = self._core.id_to_token(self.special[kind]) if kind in self.special else None
        return text

    def id_of(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it."""
        found: int | None = self._core.token_to_id(token)
        return found

    def tokens(self) -> dict[int, str]:
        """The whole table, added tokens among them: id -> the token as the vocabulary spells it."""
        return {i: token for token, i in self._core.get_vocab(with_added_tokens=True).items()}

    def is_special(self, token: int) -> bool:
        """Whether it is a control token, which decoding leaves out."""
        return token in self._skipped or token in self._hidden

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, the added ones counted; the embedding may have more rows."""
        return int(self._core.get_vocab_size(with_added_tokens=True))


class TextStream:
    """Ids one at a time -> the text that each completes. A character whose bytes are spread over tokens comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # Decoders treat the start of a text specially (SentencePiece drops one space): what stands in front is decoded along.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now."""
        if self._skip and self._tokenizer.is_special(token):
            return ""
        self._held.append(token)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):  # nothing, or perhaps the first bytes of a character
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        """What is left: bytes that never became a character."""
        text = self._pending() if self._held else ""
        self._context, self._held = [*self._context, *self._held], []
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special=self._skip) if self._context else ""
        return self._tokenizer.decode(self._context + self._held, skip_special=self._skip)[len(before) :]


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises UnsupportedError where there is none or it cannot be run, InputError where it is broken."""
    if checkpoint.naming != "gguf" and "tokenizer.json" in checkpoint.files:
        return _from_folder(checkpoint)
    if checkpoint.naming == "gguf":
        words = vocabulary.from_metadata(checkpoint.metadata, file=checkpoint.path)
    elif any(name in checkpoint.files for name in _ALONE):
        words = from_files(checkpoint.files, checkpoint.config)
    else:
        raise _absent(checkpoint.path, "there is neither tokenizer.json nor tokenizer.model beside the weights")
    return _from_words(words, checkpoint)


def _absent(file: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"no tokenizer that can be run: {why}",
        file=file,
        hint="give token ids instead of text, from Python: model.generate([1, 2, 3])",
    )


def _from_words(words: Vocabulary, checkpoint: Checkpoint) -> Tokenizer:
    if not words.tokens:
        raise _absent(checkpoint.path, (words.warnings[0] if words.warnings else "no tokens").rpartition(":")[0])
    if words.model == "gpt2" and pretokenizers.kind_of(words.pre) is None:
        raise _absent(checkpoint.path, f"pre-tokenizer '{printable(words.pre)}' is unknown here")
    notes: list[str] = []
    body = tokenizer_files.document(words, notes)
    ends = {words.special[k] for k in ("eos", "eot", "eom") if k in words.special}
    return Tokenizer(
        engine.guarded(lambda: _assembled(body), "the tokenizer cannot be used", checkpoint.path),
        special=words.special,
        ends=ends | _ends_of_folder(checkpoint),
        around=(words.prefix, ()) if words.prefix else None,
        templates=words.templates,
        file=checkpoint.path,
        notes=(*words.warnings, *notes),
    )


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    file = checkpoint.files["tokenizer.json"]
    core = _core(_bytes(file), file)
    settings = settings_of(checkpoint.files)
    special = {k: i for k in _KINDS if (i := _special_id(core, settings, checkpoint.config, k)) is not None}
    said = {k: v for k in ("bos", "eos") if isinstance(v := settings.get(f"add_{k}_token"), bool)}
    if (
        not said
        and str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer")
        and core.post_processor is None
    ):
        said = {"bos": True}  # the class puts one in front by itself

    def one(kind: str) -> list[int]:
        return [special[kind]] if said.get(kind, False) and kind in special else []

    ends = _ends_of_folder(checkpoint) | ({special["eos"]} if "eos" in special else set())
    return Tokenizer(
        core,
        special=special,
        ends=ends,
        around=(one("bos"), one("eos")) if said else None,
        templates=chat_templates(checkpoint.files, settings),
        file=file,
    )


def _special_id(core: Core, settings: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> int | None:
    """The tokenizer's word first, then config.json's."""
    entry = settings.get(f"{kind}_token")
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    found: int | None = core.token_to_id(text) if isinstance(text, str) else None
    said = config.get(f"{kind}_token_id")
    if found is None and isinstance(said, int) and not isinstance(said, bool) and 0 <= said < core.get_vocab_size():
        found = said
    return found


def _ends_of_folder(checkpoint: Checkpoint) -> set[int]:
    """eos_token_id of generation_config.json and config.json: one id or several."""
    found: set[int] = set()
    path = checkpoint.files.get("generation_config.json")
    generation = strict_json.typed(strict_json.read(path), dict, path.name, file=path) if path is not None else {}
    for config in (generation, checkpoint.config):
        said = config.get("eos_token_id")
        for i in said if isinstance(said, list) else [said]:
            if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                found.add(i)
    return found


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
    core: Core = engine.guarded(lambda: package.Tokenizer.from_str(text), "tokenizer.json cannot be used", file)
    core.no_truncation()
    core.no_padding()
    return core


def _assembled(body: Mapping[str, Any]) -> Core:
    """What from_str would make of a tokenizer.json, in half the time: the large lists go over without being written and parsed."""
    package = engine.package()
    core: Core = package.Tokenizer(_model(body["model"]))
    for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if body[stage] is not None:
            setattr(core, stage, engine.stage(stage, body[stage]))
    # Two calls: each builds the search for all of them anew. Their ids are those of the vocabulary.
    added = [package.AddedToken(**{k: v for k, v in token.items() if k != "id"}) for token in body["added_tokens"]]
    core.add_special_tokens([token for token in added if token.special])
    core.add_tokens([token for token in added if not token.special])
    return core


def _model(said: Mapping[str, Any]) -> Any:
    """The `model` of a tokenizer.json."""
    models = engine.package().models
    model = {k: v for k, v in said.items() if k != "type" and v is not None}
    vocab = model.pop("vocab")
    if said["type"] == "Unigram":
        return models.Unigram([(text, score) for text, score in vocab], **model)
    if said["type"] == "WordPiece":
        return models.WordPiece(vocab, **model)
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in model.pop("merges") for cut in (merge.find(" ", 1),)]
    return models.BPE(vocab, pairs, **model)
