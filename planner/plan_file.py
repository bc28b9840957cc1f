"""Plan <-> YAML: human-readable, versioned, exact.

In: a `Plan`, or the text of a plan file. Out: text that is byte-identical for equal plans, or a
`Plan` equal to the one written (floats keep every digit). Fields are declared once, in
`planner.plan`; `planner.codec` follows their types.

A file that cannot be read, has an unknown version, or has an unknown, missing or mistyped field
raises `PlanError` naming the file, the field, what was found and what was expected.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from .codec import Place, decode, encode, shown
from .errors import PlanError
from .plan import PLAN_VERSION, Plan

HEADER = "# A tpplan plan: times in seconds, sizes in bytes. `tpplan explain FILE` shows it as a report.\n"
LINE_WIDTH = 110


def to_yaml(plan: Plan) -> str:
    """The plan as YAML text; equal plans give equal bytes."""
    return HEADER + yaml.dump(
        encode(plan, Plan), Dumper=_Dumper, sort_keys=False, width=LINE_WIDTH, allow_unicode=True
    )


def from_yaml(text: str, *, source: str) -> Plan:
    """The plan that `text` describes. `source` names the file in messages. Raises `PlanError`."""
    place = Place(source)
    document = _parse(text, place)
    if not isinstance(document, dict):
        place.expected(f"a plan (a mapping that begins with `version: {PLAN_VERSION}`)", document)
    _check_version(document, place)
    plan = decode(document, Plan, place)
    _check_devices(plan, place)
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to `path`, whole or not at all. Raises `PlanError` if it cannot be written."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(to_yaml(plan), encoding="utf-8", newline="\n")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PlanError(f"{path}: cannot write the plan: {error.strerror}") from None


def load(path: str | os.PathLike[str]) -> Plan:
    """Read the plan at `path`. Raises `PlanError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: expected a plan in YAML, found a file that is not UTF-8 text") from None
    return from_yaml(text, source=str(path))


def _parse(text: str, place: Place) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        place.fail(f"not valid YAML: {_problem(error)}")
    except (RecursionError, ValueError, TypeError) as error:
        place.fail(f"not readable as YAML: {error}")


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + str(getattr(error, "problem", None) or error).strip()


def _check_version(document: dict[Any, Any], place: Place) -> None:
    version = document.get("version")
    if type(version) is not int or version != PLAN_VERSION:
        place.field("version").fail(
            f"expected {PLAN_VERSION} (the only version that this tpplan reads), found {shown(version)}"
        )


def _check_devices(plan: Plan, place: Place) -> None:
    used, where = plan.cluster.devices, "cluster.devices"
    if plan.cluster.parts:
        used, where = sum(part.used_devices for part in plan.cluster.parts), "the parts' used_devices"
    if plan.mesh.devices != used:
        place.field("mesh").fail(
            f"expected sizes whose product is {where} ({used}), "
            f"found {plan.mesh} ({plan.mesh.devices} devices)"
        )


# --------------------------------------------------------------------------- YAML as we write and read it


class _Dumper(yaml.SafeDumper):
    """Block style with indented lists; lists of words and numbers on one line; never anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=all(map(_is_short, items)))


def _is_short(item: Any) -> bool:
    """A number, a word, or a list of those (as in `[tp, S(ffn)@0]`)."""
    if isinstance(item, list):
        return all(map(_is_short, item))
    return not isinstance(item, dict) and " " not in str(item)


_Dumper.add_representer(list, _represent_list)


class _Loader(yaml.SafeLoader):
    """Plain values only; a key given twice is an error, not the second one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
