"""A launch line as flags with values, and what every dialect reads from them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from ..schedule import Schedule

Pins = dict[str, int | str]
Flags = Mapping[str, tuple[str, ...]]
"""The values of each flag, without its dashes and with `-` for `_`; a lone flag has no value."""

DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one dialect found; `None` where the line does not say."""

    pins: dict[str, int | str | None]
    options: dict[str, Any]
    notes: tuple[str, ...] = ()


def words_of(text: str) -> list[str]:
    """The line as a shell would split it, joined where a backslash ends a line."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise OptionError(f"--from-args: {error} in {text.strip()[:60]!r}") from None
    if not words:
        raise OptionError("--from-args: the launch line is empty")
    return words


def flags_of(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Every flag with the words up to the next one; `--a=b` counts as `--a b`."""
    flags: dict[str, tuple[str, ...]] = {}
    name = None
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            flags[name] = (value,) if equals else ()
        elif name is not None:
            flags[name] = (*flags[name], word)
    return flags


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdecimal()


def number(flags: Flags, *names: str, default: int | None = None) -> int | None:
    """The whole number of the first of `names` that the line gives."""
    for name in names:
        if name in flags:
            text = flags[name][0] if flags[name] else ""
            if not text.isdecimal() or int(text) < 1:
                raise OptionError(
                    f"--from-args: --{name} {text or '(nothing)'}: expected a whole number, at least 1"
                )
            return int(text)
    return default


def text_of(flags: Flags, name: str) -> str | None:
    """The first value of a flag; None where the line does not give one."""
    return flags[name][0] if flags.get(name) else None


def size(flags: Flags, *names: str) -> int:
    """A degree of parallelism: 1 where the line does not say."""
    return number(flags, *names, default=1) or 1


def schedule(pp: int, virtual: int) -> dict[str, int | str | None]:
    """The pins of 1F1B, interleaved where a rank has several virtual stages."""
    if pp == 1:
        return {}
    name = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    return {"schedule": str(name), "virtual_stages": virtual}
