"""A restricted reader for the pickle inside a torch file. It interprets opcodes and never imports or calls anything.

A state dict needs few of pickle's opcodes: containers, strings, small integers, a memo, and four names. Everything else
is rejected by name. Names (GLOBAL, STACK_GLOBAL) become inert tokens, REDUCE accepts four of them, and persistent ids
must be storages:

    ('storage', torch.HalfStorage, '7', 'cpu', 8192)                  -> Storage key 7, f16, 8192 elements
    torch._utils._rebuild_tensor_v2(storage, offset, size, stride, ...)  -> TensorRef

Only strings and integers are compared, used as keys or printed, so a value nested in itself a billion times costs
nothing. Work is bounded by the size: at most 16 MB and 1,000,000 opcodes. Source: Python's pickletools.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.types import Shape

__all__ = ["MAX_PICKLE", "Storage", "TensorRef", "state_dict"]

MAX_PICKLE = 16_000_000
_MAX_OPCODES = 1_000_000  # a tensor takes about 45
_MAX_DIMENSIONS = 32

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "UntypedStorage": "",
}  # fmt: skip
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_NAMES = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    *(("torch", name) for name in _STORAGES),
    ("torch.storage", "UntypedStorage"),
    *(("torch", name) for name in _DTYPES),
}


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """One storage of the archive: `count` elements of dtype ("" = raw bytes, typed by the tensor)."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor as described by the pickle; offset and strides in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: Shape
    stride: Shape


@dataclass(frozen=True, slots=True, eq=False)
class _Name:
    module: str
    name: str


class _Mark:
    pass


_MARK = _Mark()


def state_dict(data: bytes, file: object = None) -> Mapping[str, TensorRef]:
    """Return name -> tensor of a pickled state dict.

    Raises InputError for anything that a plain state dict does not need, UnsupportedError if it contains non-tensors.
    """
    if len(data) > MAX_PICKLE:
        raise InputError("pickle is too large", file=file, expected=f"at most {MAX_PICKLE} bytes", found=len(data))
    top = _Walker(data, file).run()
    if not isinstance(top, dict):
        raise UnsupportedError("torch file does not contain a state dict", file=file)
    for name, value in top.items():
        if not isinstance(value, TensorRef):
            raise UnsupportedError(
                "torch file contains objects other than tensors",
                file=file,
                tensor=name,
                hint="save only the model's state_dict",
            )
    return top


class _Walker:
    """pickle's stack machine without the opcodes that run code."""

    def __init__(self, data: bytes, file: object) -> None:
        self.data, self.file, self.at = data, file, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run until STOP and return its object."""
        data, size = self.data, len(self.data)
        for _ in range(_MAX_OPCODES):
            if self.at >= size:
                self.refuse("pickle ends too early")
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                value = self.pop()
                if self.stack or self.at != len(self.data):
                    self.refuse("pickle has data after its end")
                return value
            action = _OPCODES.get(code)
            if action is None:
                self.refuse(f"pickle opcode 0x{code:02x} is not allowed in a state dict; nothing was executed")
            action(self)
        self.refuse(f"pickle has more than {_MAX_OPCODES} opcodes")

    def refuse(self, message: str) -> NoReturn:
        raise InputError(message, file=self.file)

    # ---- bytes

    def take(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            self.refuse("pickle ends too early")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 256)
        if end < 0:
            self.refuse("pickle has an unterminated name")
        raw = self.take(end - self.at + 1)[:-1]
        return raw.decode("utf-8", "backslashreplace")

    def text(self, layout: str) -> None:
        try:
            self.stack.append(self.take(self.number(layout)).decode("utf-8"))
        except UnicodeDecodeError:
            self.refuse("pickle has a string that is not UTF-8")

    def long(self, layout: str) -> None:
        n = self.number(layout)
        if not 0 <= n <= 9:
            self.refuse(f"pickle has an integer of {n} bytes")
        self.stack.append(int.from_bytes(self.take(n), "little", signed=True))

    # ---- stack and memo

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            self.refuse("pickle pops from an empty stack")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        self.refuse("pickle has no mark on the stack")

    def tuple_of(self, n: int) -> None:
        items = tuple(self.stack[-n:])
        if len(items) < n or _MARK in items:
            self.refuse("pickle pops from an empty stack")
        self.stack[-n:] = [items]

    def put(self, key: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            self.refuse("pickle memoizes from an empty stack")
        self.memo[key] = self.stack[-1]

    def get(self, key: int) -> None:
        if key not in self.memo:
            self.refuse("pickle reads a memo entry that was never stored")
        self.stack.append(self.memo[key])

    # ---- containers

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            self.refuse("pickle appends to a non-container")
        return self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            self.refuse("pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                self.refuse("pickle has a non-string key")
            if key in target:
                self.refuse(f"pickle has the key '{printable(key)}' twice")
            target[key] = value

    # ---- the four names

    def name(self, module: Any, name: Any) -> None:
        known = isinstance(module, str) and isinstance(name, str) and (module, name) in _NAMES
        if not known:
            shown = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "a non-string name"
            self.refuse(
                f"pickle refers to {printable(shown)}, which is not allowed in a state dict; nothing was executed"
            )
        self.stack.append(_Name(module, name))

    def reduce(self) -> None:
        arguments, callee = self.pop(), self.pop()
        if not isinstance(callee, _Name) or not isinstance(arguments, tuple):
            self.refuse("pickle calls an object that is not a name; nothing was executed")
        if callee.name == "OrderedDict" and not arguments:
            self.stack.append({})
        elif callee.name == "_rebuild_tensor_v2" and len(arguments) in (6, 7):
            self.stack.append(self.tensor(arguments[:4], None))
        elif callee.name == "_rebuild_tensor_v3" and len(arguments) in (7, 8):
            self.stack.append(self.tensor(arguments[:4], arguments[6]))
        elif callee.name == "_rebuild_parameter" and len(arguments) == 3 and isinstance(arguments[0], TensorRef):
            self.stack.append(arguments[0])
        else:
            self.refuse(f"pickle calls {callee.module}.{callee.name} with unexpected arguments; nothing was executed")

    def tensor(self, arguments: tuple[Any, ...], dtype: Any) -> TensorRef:
        storage, offset, shape, stride = arguments
        if not isinstance(storage, Storage) or not _natural(offset) or not _naturals(shape) or not _naturals(stride):
            self.refuse("pickle describes a tensor with wrong types")
        if dtype is None:
            element = storage.dtype
        else:
            element = _DTYPES.get(dtype.name, "") if isinstance(dtype, _Name) and dtype.module == "torch" else ""
        if not element:
            self.refuse("pickle describes a tensor without a dtype")
        if len(shape) != len(stride) or len(shape) > _MAX_DIMENSIONS:
            self.refuse("pickle describes a tensor with wrong dimensions")
        return TensorRef(storage, element, offset, shape, stride)

    def persistent(self) -> None:
        pid = self.pop()
        if not isinstance(pid, tuple) or len(pid) != 5 or not isinstance(pid[0], str) or pid[0] != "storage":
            self.refuse("pickle has a persistent id that is not a storage")
        kind, key, count = pid[1], pid[2], pid[4]
        if not isinstance(kind, _Name) or kind.name not in _STORAGES or not isinstance(key, str) or not _natural(count):
            self.refuse("pickle describes a storage with wrong types")
        self.stack.append(Storage(key, _STORAGES[kind.name], count))

    def build(self) -> None:
        """Ignore the state of an OrderedDict: `_metadata` (module versions), which weights do not need."""
        state = self.pop()
        self.top(dict)
        if not isinstance(state, dict) or set(state) - {"_metadata"}:
            self.refuse("pickle sets attributes")

    def protocol(self) -> None:
        if self.take(1)[0] not in (2, 3, 4, 5) or self.at != 2:
            self.refuse("pickle has a wrong protocol")


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _naturals(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_natural, value))


def _push(make: Callable[[_Walker], Any]) -> Callable[[_Walker], None]:
    return lambda w: w.stack.append(make(w))


def _discard(w: _Walker) -> None:
    w.pop()


def _stack_global(w: _Walker) -> None:
    name, module = w.pop(), w.pop()
    w.name(module, name)


def _set_item(w: _Walker) -> None:
    value, key = w.pop(), w.pop()
    w.set_items([key, value])


def _append(w: _Walker) -> None:
    value = w.pop()
    w.top(list).append(value)


def _appends(w: _Walker) -> None:
    items = w.since_mark()
    w.top(list).extend(items)


def _set_items(w: _Walker) -> None:
    items = w.since_mark()
    w.set_items(items)


_OPCODES: dict[int, Callable[[_Walker], None]] = {
    0x80: _Walker.protocol,
    0x95: lambda w: None if w.number("<Q") <= len(w.data) - w.at else w.refuse("pickle frame is too long"),  # FRAME
    0x28: _push(lambda _: _MARK),  # MARK
    0x30: _discard,  # POP
    0x7D: _push(lambda _: {}),  # EMPTY_DICT
    0x5D: _push(lambda _: []),  # EMPTY_LIST
    0x29: _push(lambda _: ()),  # EMPTY_TUPLE
    0x74: _push(lambda w: tuple(w.since_mark())),  # TUPLE
    0x85: lambda w: w.tuple_of(1),
    0x86: lambda w: w.tuple_of(2),
    0x87: lambda w: w.tuple_of(3),
    0x61: _append,
    0x65: _appends,
    0x73: _set_item,
    0x75: _set_items,
    0x4E: _push(lambda _: None),  # NONE
    0x88: _push(lambda _: True),  # NEWTRUE
    0x89: _push(lambda _: False),  # NEWFALSE
    0x4A: _push(lambda w: w.number("<i")),  # BININT
    0x4B: _push(lambda w: w.number("<B")),  # BININT1
    0x4D: _push(lambda w: w.number("<H")),  # BININT2
    0x47: _push(lambda w: w.number(">d")),  # BINFLOAT
    0x8A: lambda w: w.long("<B"),  # LONG1
    0x8B: lambda w: w.long("<i"),  # LONG4
    0x58: lambda w: w.text("<I"),  # BINUNICODE
    0x8C: lambda w: w.text("<B"),  # SHORT_BINUNICODE
    0x8D: lambda w: w.text("<Q"),  # BINUNICODE8
    0x63: lambda w: w.name(w.line(), w.line()),  # GLOBAL
    0x93: _stack_global,
    0x52: _Walker.reduce,
    0x51: _Walker.persistent,
    0x62: _Walker.build,
    0x71: lambda w: w.put(w.number("<B")),  # BINPUT
    0x72: lambda w: w.put(w.number("<I")),  # LONG_BINPUT
    0x94: lambda w: w.put(len(w.memo)),  # MEMOIZE
    0x68: lambda w: w.get(w.number("<B")),  # BINGET
    0x6A: lambda w: w.get(w.number("<I")),  # LONG_BINGET
}
