"""Strict JSON: read a document that nobody vouches for, and check its values one by one.

Stricter than json.loads: no duplicate keys, no NaN or Infinity, no integer above 2^53 - 1 (beyond it readers in
other languages lose digits), no byte-order mark, no lone surrogates, bounded size and depth. Every check takes
`at`, the place in the document, and raises JsonError naming it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_INTEGER = 2**53 - 1
MAX_INTEGER_DIGITS = 16
MAX_FLOAT_DIGITS = 64

_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class JsonError(ValueError):
    """A document that is not what it must be; the message names the place and what was expected."""


def parse_json(raw: bytes) -> object:
    """Parse UTF-8 JSON; raise JsonError for anything that two readers could understand differently."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"byte {error.start} is not UTF-8") from None
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"line {error.lineno} column {error.colno} is not JSON ({error.msg})") from None
    except RecursionError:
        raise JsonError("the JSON is nested too deeply") from None


def check_object(value: object, keys: frozenset[str], at: str) -> dict[str, Any]:
    """Return value as a dict when it has exactly these keys."""
    if not isinstance(value, dict):
        _refuse(at, "an object", value)
    if value.keys() != keys:
        missing, unknown = sorted(keys - value.keys()), sorted(value.keys() - keys)
        what = [f"misses {', '.join(missing)}"] if missing else []
        what += [f"has unknown {', '.join(f'{key!r:.40}' for key in unknown[:5])}"] if unknown else []
        raise JsonError(f"{at} {' and '.join(what)}")
    return value


def check_list(value: object, at: str, *, longest: int, shortest: int = 0) -> list[Any]:
    """Return value as a list of a bounded length."""
    if not isinstance(value, list) or not shortest <= len(value) <= longest:
        _refuse(at, f"a list of {shortest} to {longest} values", value)
    return value


def check_int(value: object, at: str, *, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Return value as an int in least..most; true, false and 1.0 are not ints."""
    if type(value) is not int or not least <= value <= most:
        _refuse(at, f"a whole number from {least} to {most}", value)
    return value


def check_bool(value: object, at: str) -> bool:
    """Return value as a bool; 0 and 1 are not bools."""
    if not isinstance(value, bool):
        _refuse(at, "true or false", value)
    return value


def check_float(value: object, at: str) -> float:
    """Return value as a finite float."""
    if not isinstance(value, float) or not math.isfinite(value):
        _refuse(at, "a finite number", value)
    return value


def check_str(value: object, at: str, *, longest: int, shortest: int = 1) -> str:
    """Return value as a string of a bounded length without control characters or lone surrogates."""
    if not isinstance(value, str) or not shortest <= len(value) <= longest or _UNPRINTABLE.search(value):
        _refuse(at, f"a printable string of {shortest} to {longest} characters", value)
    return value


def check_pattern(value: object, pattern: re.Pattern[str], at: str, what: str) -> str:
    """Return value as a string that matches pattern from end to end."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        _refuse(at, what, value)
    return value


def check_sha256(value: object, at: str) -> str:
    """Return value as 64 lower-case hex digits."""
    return check_pattern(value, _SHA256, at, "64 lower-case hex digits")


def shown(value: object) -> str:
    """Return a short, printable form of an untrusted value for a message."""
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    text = ascii(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(at: str, expected: str, value: object) -> NoReturn:
    raise JsonError(f"{at}: expected {expected}, got {shown(value)}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"the key {shown(key)} stands twice in one object")
            seen.add(key)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS + 1 or not -MAX_INTEGER <= int(digits) <= MAX_INTEGER:
        raise JsonError(f"the number {shown(digits)} is beyond 2^53 - 1")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits) if len(digits) <= MAX_FLOAT_DIGITS else math.inf
    if not math.isfinite(number):
        raise JsonError(
            f"the number {shown(digits)} is not finite, or has more than {MAX_FLOAT_DIGITS} digits"
        )
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")
