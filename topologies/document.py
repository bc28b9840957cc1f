"""A YAML file becomes plain data that remembers its lines, so that every complaint names one.

In: a path. Out: a `Document`: the data, and the line of any field. A field is addressed by its
path in the data, `("levels", 0, "gb_per_s")`, written `levels[0].gb_per_s` in messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planner.errors import TopologyError

if TYPE_CHECKING:
    import yaml

FieldPath = tuple[int | str, ...]
BAD_TAGS = (ValueError, LookupError, AttributeError, TypeError, OverflowError)
"""What PyYAML lets through for a value that belies its type, such as `!!bool maybe` or 2024-99-99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One parsed file: plain data and the YAML nodes that tell where each part stands."""

    path: Path
    data: Any
    root: yaml.Node

    def line(self, field: FieldPath) -> int:
        """The line (from 1) of `field`, or of its nearest enclosing part that exists."""
        node, line = self.root, self.root.start_mark.line
        for part in field:
            found = _child(node, part)
            if found is None:
                break
            key, node = found
            line = key.start_mark.line
        return line + 1

    def error(self, field: FieldPath, problem: str) -> TopologyError:
        """`file:line: field: problem` as an exception to raise."""
        return TopologyError(f"{self.path}:{self.line(field)}: {spell(field)}{problem}")


def spell(field: FieldPath) -> str:
    """`levels[0].size: ` for `("levels", 0, "size")`; empty for the document itself."""
    text = ""
    for part in field:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return f"{text}: " if text else ""


def read(path: Path) -> Document:
    """Parse the file `path`. Raises as `parse`, or `TopologyError` if it cannot be read."""
    return parse(_text(path), path)


def parse(text: str, path: Path) -> Document:
    """Parse a text that is, or will be, the file `path`.

    Raises `TopologyError` for anything that is not one YAML mapping.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise TopologyError(f"{path}:1: the file is empty; expected a mapping of fields")
        _reject_duplicates(path, node)
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise TopologyError(f"{path}:{_line_of(error)}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise TopologyError(f"{path}:1: not YAML: {error}") from error
    except RecursionError as error:
        raise TopologyError(f"{path}:1: nested too deeply to be a topology") from error
    except BAD_TAGS as error:
        raise TopologyError(f"{path}:1: not YAML: a value does not fit its type ({error})") from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        kind = {"list": "list", "str": "text"}.get(type(data).__name__, "value")
        raise TopologyError(
            f"{path}:{node.start_mark.line + 1}: expected a mapping of fields, found a {kind}"
        )
    return Document(path=path, data=data, root=node)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise TopologyError(f"{path}:{line}: not a text file (byte {error.start} is not UTF-8)") from error
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from error


def _line_of(error: yaml.MarkedYAMLError) -> int:
    """Where to look: the place of the problem, or what was left open if that is the file's end."""
    marks = (error.problem_mark, error.context_mark)
    at_end = "end of stream" in (error.problem or "")
    mark = next((m for m in (reversed(marks) if at_end else marks) if m is not None), None)
    return mark.line + 1 if mark else 1


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """The node under `part` and the node whose line speaks for it (a mapping's key)."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if pair[0].value == str(part)), None)
    return None


def _reject_duplicates(path: Path, root: yaml.Node) -> None:
    """YAML lets a second key silently replace the first; here it is an error."""
    import yaml

    stack, visited = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            stack.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: dict[str, int] = {}
            for key, value in node.value:
                stack.append(value)
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in keys:
                    first = keys[key.value]
                    raise TopologyError(f"{path}:{line}: {key.value}: given twice, first on line {first}")
                keys[key.value] = line
