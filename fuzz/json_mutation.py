"""A JSON document changed at random in one to three places, still JSON: deeper than changed bytes can reach."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 255, 4095, 4096, 1 << 31, (1 << 53) - 1, 1 << 53, 1 << 64, -(1 << 63)),
    *(0.0, 1.5, -0.0, 1e308, float("inf"), 4096.0),
    *("", ".", "..", "../../../etc/passwd", "/etc/passwd", "C:\\x", "a\\..\\b", "a//b", "a\0b", "\ud800"),
    *("experts/L000/E0000.bin", "shared.bin", "manifest.json", "F32", "Q4_K", "F4", "x" * 5000),
    *([], {}, [[]], [0] * 9, [1 << 40, 1 << 40], {"": None}),
)


def mutate_json(raw: bytes, random: Random) -> bytes:
    """Return another document; raises ValueError when raw is not JSON."""
    document = json.loads(raw)
    for _ in range(random.randint(1, 3)):
        document = _mutate(document, random)
    return json.dumps(document).encode()


def _mutate(document: Any, random: Random) -> Any:
    """Change one place, chosen with the same chance at each step down, so that few long lists do not take all."""
    holder: list[Any] = [document]
    place, key = _random_place(holder, random)
    change = random.randrange(7)
    found = place[key]
    if change == 0 and len(place) > 1:
        del place[key]
    elif change == 1 and isinstance(place, list):
        place.insert(random.randint(0, len(place)), copy.deepcopy(found))
    elif change == 2 and isinstance(place, dict):
        place[random.choice(("", "x", key + " ", key.upper()))] = place.pop(key)
    elif change == 3:
        other, other_key = _random_place(holder, random)
        place[key] = copy.deepcopy(other[other_key])
    elif change == 4 and isinstance(place, list):
        random.shuffle(place)
    elif isinstance(found, int) and change < 6:
        place[key] = random.choice((found + 1, found - 1, found * 2, found // 2, -found, float(found)))
    elif isinstance(found, str) and found and change < 6:
        at = random.randrange(len(found))
        place[key] = found[:at] + random.choice(("", "0", "/", ":", "..", "ü")) + found[at + 1 :]
    else:
        place[key] = random.choice(NASTY)
    return holder[0]


def _random_place(holder: list[Any], random: Random) -> tuple[Any, Any]:
    """Walk down from the document; return a list or dict, and one of its keys."""
    place, key = holder, 0
    while isinstance(place[key], list | dict) and place[key] and random.random() < 0.9:
        place = place[key]
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
    return place, key
