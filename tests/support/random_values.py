"""Random values of the column types that MariaDB and MySQL have, as SQL literals."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable
from functools import partial

_BYTES = {"tinyint": 1, "boolean": 1, "smallint": 2, "mediumint": 3, "int": 4, "bigint": 8}
_ASCII = "aZ09 '\"\\%_\0\n\x1a\x7f"
_WIDE = "żółćÿ€łДжЯ日本中文한국ßﬀ\u0301\u200b\ufffd"
_BEYOND = "😀𠀀\U0010ffff"
_OF_CHARSET = {
    "latin1": "äöüÿþ€éß",
    "latin2": "łódźżąĘ",
    "cp1251": "ПриветЖ№",
    "koi8r": "ПриветЖ",
    "sjis": "日本語かなカナ",
    "ujis": "日本語かなカナ",
    "gbk": "中文字符测试",
    "big5": "中文字元",
    "euckr": "한국어글자",
    "utf8mb3": _WIDE,
}
_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def random_literal(rng: random.Random, column_type: str) -> str:
    """A value of this type, for a session in UTC."""
    word = re.match(r"[a-z0-9]+", column_type)
    assert word is not None
    numbers = [int(digits) for digits in re.findall(r"\d+", column_type.partition("(")[2])]
    unsigned = "unsigned" in column_type
    if word[0] in _BYTES:
        return _integer(rng, _BYTES[word[0]], unsigned)
    if word[0] in ("decimal", "numeric"):
        return _decimal(rng, numbers[0], numbers[1], unsigned)
    if "char" in word[0] or word[0].endswith("text"):
        charset = re.search(r"character set (\w+)", column_type)
        return _text(rng, charset[1] if charset else "utf8mb4", min([40, *numbers[:1]]))
    if "binary" in word[0] or word[0].endswith("blob"):
        return _bytes(rng, min([40, *numbers[:1]]))
    if word[0] in ("enum", "set"):
        count = len(re.findall(r"'(?:[^']|'')*'", column_type))
        return str(rng.randint(0, count if word[0] == "enum" else 2**count - 1))
    makers: dict[str, Callable[[], str]] = {
        "float": partial(_float, rng, unsigned, bool(numbers)),
        "double": partial(_double, rng, unsigned),
        "real": partial(_double, rng, unsigned),
        "date": lambda: f"'{_day(rng)}'",
        "datetime": lambda: f"'{_day(rng)} {_clock(rng, 23)}{_fraction(rng, numbers)}'",
        "time": lambda: _time(rng, numbers),
        "timestamp": lambda: _moment(rng, numbers),
        "year": lambda: str(rng.choice([0, rng.randint(1901, 2155)])),
        "bit": lambda: str(rng.getrandbits(rng.randint(1, numbers[0]))),
        "json": lambda: _hex_text(json.dumps(_json(rng, 3), ensure_ascii=rng.random() < 0.5)),
        "uuid": lambda: f"x'{rng.randbytes(16).hex()}'",
        "inet6": lambda: f"x'{_address(rng, 16).hex()}'",
        "inet4": lambda: f"x'{_address(rng, 4).hex()}'",
        "vector": lambda: f"x'{_vector(rng, numbers).hex()}'",
    }
    make = makers.get(word[0], partial(_shape, rng, word[0]))
    return make()


def _integer(rng: random.Random, byte_count: int, unsigned: bool) -> str:
    bits = 8 * byte_count
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    near = rng.getrandbits(rng.randint(1, bits)) * rng.choice([1, -1])
    return str(rng.choice([low, high, max(low, min(high, near))]))


def _decimal(rng: random.Random, precision: int, scale: int, unsigned: bool) -> str:
    digits = f"{rng.randrange(10 ** rng.randint(1, precision)):0{precision}d}"
    sign = "" if unsigned else rng.choice(["", "-"])
    return f"{sign}{digits[: precision - scale] or 0}.{digits[precision - scale :] or 0}"


def _float(rng: random.Random, unsigned: bool, digits: bool) -> str:
    if digits:
        return f"{rng.uniform(-9999, 9999):.3f}"
    (value,) = struct.unpack("<f", rng.randbytes(4))
    return repr(_finite(value, unsigned))


def _double(rng: random.Random, unsigned: bool) -> str:
    (value,) = struct.unpack("<d", rng.randbytes(8))
    return repr(_finite(rng.choice([value, rng.uniform(-1e6, 1e6)]), unsigned))


def _finite(value: float, unsigned: bool) -> float:
    if not math.isfinite(value):
        value = -0.0
    return abs(value) if unsigned else value


def _text(rng: random.Random, charset: str, longest: int) -> str:
    alphabet = _ASCII + _OF_CHARSET.get(charset, _WIDE + _BEYOND)
    return _hex_text("".join(rng.choices(alphabet, k=rng.randint(0, longest))))


def _hex_text(text: str) -> str:
    return f"_utf8mb4 x'{text.encode().hex()}'"


def _bytes(rng: random.Random, longest: int) -> str:
    """Often with zeros or spaces at its end, which some storage drops or adds."""
    found = rng.randbytes(rng.randint(0, longest)) + rng.choice([b"", b"\0\0", b"  ", b"\0 \0"])
    return f"x'{found[:longest].hex()}'"


def _day(rng: random.Random) -> str:
    year, month = rng.choice([1, 1000, 1969, rng.randint(1, 9999), 9999]), rng.randint(1, 12)
    return f"{year:04d}-{month:02d}-{rng.randint(1, _DAYS[month - 1]):02d}"


def random_no_date(rng: random.Random, column_type: str) -> str:
    """A date with zeros in it, or behind one some time of that day."""
    if column_type.startswith("timestamp"):
        return "0"
    year, month, day = rng.choice([(0, 0, 0), (2020, 0, 0), (2020, 0, 31), (9999, 12, 0)])
    clock = "" if column_type == "date" else f" {_clock(rng, 23)}.{rng.randrange(10**6):06d}"
    return f"'{year:04d}-{month:02d}-{day:02d}{clock}'"


def _clock(rng: random.Random, hours: int) -> str:
    return f"{rng.randint(0, hours):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}"


def _fraction(rng: random.Random, numbers: list[int]) -> str:
    """So many digits of a second as the type has."""
    if not numbers:
        return ""
    part = rng.choice([0, 1, 10 ** numbers[0] - 1, rng.randrange(10 ** numbers[0])])
    return f".{part:0{numbers[0]}d}"


def _time(rng: random.Random, numbers: list[int]) -> str:
    clock = _clock(rng, rng.choice([0, 23, 837]))
    return f"'{rng.choice(['', '-'])}{clock}{_fraction(rng, numbers)}'"


def _moment(rng: random.Random, numbers: list[int]) -> str:
    second = rng.choice([1, 2**31 - 1, rng.randrange(1, 2**31)])
    moment = f"TIMESTAMP'1970-01-01 00:00:00' + INTERVAL {second} SECOND"
    fraction = _fraction(rng, numbers)
    return moment + (f" + INTERVAL 0{fraction} SECOND" if fraction else "")


def _json(rng: random.Random, depth: int) -> object:
    leaves: list[Callable[[], object]] = [
        lambda: rng.choice([None, True, False, "", "ż😀\u0001\\\"'"]),
        lambda: rng.getrandbits(rng.randint(1, 63)) * rng.choice([1, -1]),
        lambda: 2**64 - 1 - rng.getrandbits(8),
        lambda: rng.uniform(-1, 1) * 10.0 ** rng.randint(-20, 20),
        lambda: "x" * rng.choice([1, 127, 128, 300]),
    ]
    kind = rng.randint(0, 2) if depth else 0
    if kind == 0:
        return rng.choice(leaves)()
    members = [_json(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    if kind == 1:
        return members
    return {rng.choice("abcdż") * rng.randint(1, 5): member for member in members}


def _address(rng: random.Random, byte_count: int) -> bytes:
    """With zeros in front and behind, too."""
    before, behind = rng.randint(0, byte_count // 2), rng.randint(0, byte_count // 2)
    return bytes(before) + rng.randbytes(byte_count - before - behind) + bytes(behind)


def _vector(rng: random.Random, numbers: list[int]) -> bytes:
    count = numbers[0] if numbers else rng.randint(1, 9)
    return struct.pack(f"<{count}f", *(rng.uniform(-1e9, 1e9) for _ in range(count)))


def _shape(rng: random.Random, kind: str) -> str:
    """A geometry of the named kind, or a point."""

    def coordinates() -> str:
        return f"{rng.uniform(-80, 80)!r} {rng.uniform(-80, 80)!r}"

    def line() -> str:
        return "(" + ",".join(coordinates() for _ in range(rng.randint(2, 5))) + ")"

    def ring() -> str:
        return f"((0 0,{rng.randint(1, 9)} 0,{rng.randint(1, 9)} {rng.randint(1, 9)},0 0))"

    contents: dict[str, Callable[[], str]] = {
        "linestring": line,
        "polygon": ring,
        "multipoint": line,
        "multilinestring": lambda: f"({line()},{line()})",
        "multipolygon": lambda: f"({ring()},{ring()})",
        "geometrycollection": lambda: f"(POINT({coordinates()}),LINESTRING{line()})",
    }
    content = contents.get(kind)
    if content is None:
        return f"ST_GeomFromText('POINT({coordinates()})', {rng.choice([0, 4326])})"
    return f"ST_GeomFromText('{kind}{content()}')"
