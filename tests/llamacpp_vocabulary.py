"""llama.cpp's tokenizer as an oracle: the C interface (llama.h) that the `xllamacpp` wheel's library exports.

The wheel binds only the server, which says nothing about single bytes, detokenizing or kinds of tokens. Its library
exports llama.h all the same. The one structure that is passed by value, llama_model_params, is taken as bytes from
llama_model_default_params and handed back unread, so its layout does not matter here.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
import xllamacpp

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_PIECE_NBYTES = 1024


class _ModelParams(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_uint8 * 1024),)  # larger than any version's


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


_silent = _LogCallback(
    lambda _level, _text, _data: None
)  # kept here, because the library keeps only its address


@cache
def _library() -> ctypes.CDLL:
    path = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"), None)
    if path is None:
        pytest.skip("this build of xllamacpp has no shared library beside it")
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "llama_model_load_from_file"):
        pytest.skip("this build of xllamacpp does not export llama.h")
    pointer, token, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    prototypes = {
        "llama_model_default_params": (_ModelParams, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _ModelParams]),
        "llama_model_free": (None, [pointer]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (token, [pointer]),
        "llama_vocab_is_eog": (flag, [pointer, token]),
        "llama_vocab_get_add_bos": (flag, [pointer]),
        "llama_tokenize": (token, [pointer, ctypes.c_char_p, token, pointer, token, flag, flag]),
        "llama_detokenize": (token, [pointer, pointer, token, ctypes.c_char_p, token, flag, flag]),
        "llama_token_to_piece": (token, [pointer, token, ctypes.c_char_p, token, token, flag]),
        "llama_log_set": (None, [_LogCallback, pointer]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_silent, None)
    return library


class LlamaCppVocabulary:
    """The vocabulary of a GGUF as llama.cpp reads it; a context manager, because it holds the model."""

    def __init__(self, path: Path) -> None:
        library = _library()
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        assert self._model, f"llama.cpp refuses {path}"
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self.vocab_size: int = library.llama_vocab_n_tokens(self._vocabulary)
        self.adds_bos: bool = library.llama_vocab_get_add_bos(self._vocabulary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        _library().llama_model_free(self._model)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The ids of a text."""
        raw = text.encode()
        room = len(raw) + 16
        ids = (ctypes.c_int32 * room)()
        count = _library().llama_tokenize(
            self._vocabulary, raw, len(raw), ids, room, add_special, parse_special
        )
        assert count >= 0, f"{-count} ids do not fit"
        return ids[:count]

    def detokenize(self, ids: Sequence[int], *, remove_special: bool, unparse_special: bool) -> bytes:
        """The text of ids, as bytes."""
        room = _MAX_PIECE_NBYTES * max(len(ids), 1)
        text = ctypes.create_string_buffer(room)
        array = (ctypes.c_int32 * len(ids))(*ids)
        count = _library().llama_detokenize(
            self._vocabulary, array, len(ids), text, room, remove_special, unparse_special
        )
        assert count >= 0, f"{-count} bytes do not fit"
        return text.raw[:count]

    def piece(self, token_id: int) -> bytes:
        """A token's bytes."""
        text = ctypes.create_string_buffer(_MAX_PIECE_NBYTES)
        count = _library().llama_token_to_piece(self._vocabulary, token_id, text, _MAX_PIECE_NBYTES, 0, True)
        return text.raw[:count]

    def eog_ids(self) -> set[int]:
        """The tokens that end a generation."""
        return {i for i in range(self.vocab_size) if _library().llama_vocab_is_eog(self._vocabulary, i)}
