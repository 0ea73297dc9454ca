"""Reading a tree of frozen dataclasses from YAML files and command-line overrides, and writing it back.

Knows types, not keys: which keys there are, their defaults and their rules stand in config.py.
"""

import dataclasses
import math
import os
import re
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

import yaml

from diffjax.errors import UserError

# The scalars of the YAML 1.2 core schema (yaml.org/spec/1.2.2, section 10.3.2). PyYAML's own are those of YAML 1.1,
# where `1e-3` is text, `no` is false, `010` is 8 and `1:30` is 90.
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    (_TAG + "null", _NULL, ["~", "n", "N", ""]),
    (_TAG + "bool", _BOOL, list("tTfF")),
    (_TAG + "int", _INT, list("-+0123456789")),
    (_TAG + "float", _FLOAT, list("-+0123456789.")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own way: a class attribute that replaces the inherited one)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else; lists of scalars stand on one line."""


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence(_TAG + "seq", data, flow_style=True))


class _WrongType(Exception):
    """A value that its key cannot take; `at` names the place inside a list."""

    def __init__(self, expected: str, got: str, at: str = ""):
        super().__init__(f"expected {expected}, got {got}")
        self.at = at


def load(cls, path, overrides=()):
    """Read `path`, the files it names as `base`, and `overrides` (texts `section.key=value`) into an instance of `cls`.

    Later wins: base < file < overrides. Raises one UserError that lists every mistake, a line each.
    """
    errors: list[str] = []
    values: dict[str, object] = {}
    for name, root in _chain(os.fspath(path), errors):
        _read_section(cls, root, "", cls, name, values, errors)
    _read_overrides(cls, overrides, values, errors)
    if errors:
        raise UserError("\n".join(errors))
    return _build(cls, values, "")


def to_dict(config) -> dict:
    """The config as nested dicts, lists and scalars: what JSON and YAML can hold."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(dataclasses.asdict(config))


def dump_yaml(config) -> str:
    """The config as a YAML text that `load` reads back to an equal config."""
    return yaml.dump(
        to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=math.inf
    )


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    """Nested dicts as one dict of dotted keys."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def leaf_fields(cls, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Dotted key -> dataclass field, of every key that holds a value."""
    leaves = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        leaves |= leaf_fields(field.type, name + ".") if dataclasses.is_dataclass(field.type) else {name: field}
    return leaves


# Files


def _chain(path: str, errors: list[str]) -> list[tuple[str, yaml.MappingNode]]:
    """The file and its bases as (name, root node), the outermost base first. What cannot be read goes to `errors`."""
    chain: list[tuple[str, yaml.MappingNode]] = []
    places: list[str] = []
    name, origin = path, ""
    while True:
        try:
            root = _compose(name)
        except UserError as error:
            errors.append(f"{origin}{error}")
            return chain
        chain.insert(0, (name, root))
        base = next((pair for pair in root.value if pair[0].value == "base"), None)
        if base is None:
            return chain
        places.append(f"{name}:{base[0].start_mark.line + 1}: base: ")
        try:
            target = _coerce(str, base[1])
        except _WrongType as error:
            errors.append(f"{places[-1]}{error}")
            return chain
        name, origin = os.path.normpath(os.path.join(os.path.dirname(name), target)), places[-1]
        visited = [file for file, _ in reversed(chain)]
        for index, file in enumerate(visited):
            if os.path.realpath(file) == os.path.realpath(name):
                errors.append(f"{places[index]}loop {' -> '.join([*visited[index:], file])}")
                return chain


def _compose(name: str) -> yaml.MappingNode:
    """The file's root node; lines are kept in the nodes. Raises UserError when it is no YAML mapping."""
    if os.path.isdir(name):
        inner = os.path.join(name, "config.yaml")
        hint = f"; did you mean {inner}?" if os.path.isfile(inner) else ""
        raise UserError(f"{name}: is a folder, not a YAML file{hint}")
    try:
        with open(name, "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: is not UTF-8 text (byte {raw[error.start]:#04x})") from None
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{name}:{line}: not valid YAML: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{name}:{mark.line + 1}: not valid YAML: {_problem(error)}") from None
    except RecursionError:
        raise UserError(f"{name}: not valid YAML: nested too deeply") from None
    if root is None:
        raise UserError(f"{name}: is empty; a config holds sections such as 'run:' and 'model:'")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name}: expected sections such as 'run:' and 'model:' at the top level, got {_got(root)}")
    return root


def _problem(error: yaml.MarkedYAMLError) -> str:
    return ", ".join(" ".join(part.split()) for part in (error.context, error.problem) if part)


def _read_section(cls, node, prefix: str, root, name: str, values: dict, errors: list[str]) -> None:
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            errors.append(f"{name}:{line}: a key must be a plain word, got {_got(key_node)}")
            continue
        key, dotted = key_node.value, prefix + key_node.value
        if key in first_line:
            errors.append(f"{name}:{line}: '{dotted}' is given twice (first on line {first_line[key]})")
            continue
        first_line[key] = line
        if dotted == "base":
            continue
        if key not in fields:
            errors.append(f"{name}:{line}: {_unknown_key(root, prefix[:-1], key)}")
        elif not dataclasses.is_dataclass(fields[key]):
            try:
                values[dotted] = _coerce(fields[key], value_node)
            except _WrongType as error:
                errors.append(f"{name}:{line}: {dotted}{error.at}: {error}")
        elif isinstance(value_node, yaml.MappingNode):
            _read_section(fields[key], value_node, dotted + ".", root, name, values, errors)
        else:
            errors.append(f"{name}:{line}: {dotted}: expected a section of keys, got {_got(value_node)}")


# The command line


def _read_overrides(cls, overrides, values: dict, errors: list[str]) -> None:
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            errors.append(f"command line: '{override}' is not of the form section.key=value")
            continue
        if key in given:
            errors.append(f"command line: '{key}' is given twice: '{given[key]}' and '{override}'")
            continue
        given[key] = override
        try:
            kind = _find_key(cls, key)
            values[key] = _coerce(kind, _override_node(kind, text))
        except _WrongType as error:
            errors.append(f"command line: {key}{error.at}: {error}")
        except UserError as error:
            errors.append(f"command line: {error}")


def _find_key(cls, dotted: str):
    """The type of the key, or UserError."""
    node, walked = cls, []
    for word in dotted.split("."):
        section = ".".join(walked)
        if not dataclasses.is_dataclass(node):
            raise UserError(f"unknown key '{dotted}'; '{section}' holds a value and has no keys")
        if not walked and word == "base":
            raise UserError("'base' can be given in a file only")
        fields = {field.name: field.type for field in dataclasses.fields(node)}
        if word not in fields:
            raise UserError(_unknown_key(cls, section, word))
        node = fields[word]
        walked.append(word)
    if dataclasses.is_dataclass(node):
        first = dataclasses.fields(node)[0].name
        raise UserError(f"'{dotted}' is a section; name one of its keys, such as {dotted}.{first}=...")
    return node


def _override_node(kind, text: str) -> yaml.Node:
    """The value as a YAML node. A key that takes text takes it as it stands: the shell has used up the quotes."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError):
        node = None
    if str in (get_args(kind) or (kind,)):
        quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        if not quoted and not _NULL.match(text.strip()):
            return yaml.ScalarNode(_TAG + "str", text, style='"')
    if node is None:
        return yaml.ScalarNode(_TAG + ("str" if text.strip() else "null"), text)
    return node


# Types


def _coerce(kind, node: yaml.Node):
    """The node's value as `kind` (a type of a dataclass field). Raises _WrongType."""
    value = _scalar(node) if isinstance(node, yaml.ScalarNode) else node
    origin = get_origin(kind)
    if kind is float:
        if isinstance(value, str) and (_INT.match(value) or _FLOAT.match(value)):
            value = _number(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) > 1.7e308 or math.isnan(value):
                raise _WrongType("a finite number", _got(node))
            return float(value)
    elif kind in (int, bool, NoneType):
        if type(value) is kind:
            return value
    elif kind is str:
        if isinstance(value, str):
            return value
        if isinstance(node, yaml.ScalarNode) and value is not None:
            raise _WrongType("text", f"{node.value}; write it in quotes: '{node.value}'")
    elif origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
            return value
    elif origin in (Union, UnionType):
        for branch in get_args(kind):
            try:
                return _coerce(branch, node)
            except _WrongType:
                continue
    elif origin is tuple and isinstance(node, yaml.SequenceNode) and len(node.value) == len(get_args(kind)):
        return tuple(map(_coerce_item, get_args(kind), node.value, range(len(node.value))))
    raise _WrongType(_expected(kind), _got(node))


def _coerce_item(kind, node, index: int):
    try:
        return _coerce(kind, node)
    except _WrongType as error:
        error.at = f"[{index}]"
        raise


def _scalar(node: yaml.ScalarNode):
    """The Python value of a scalar by its YAML 1.2 core tag."""
    tag, text = node.tag.removeprefix(_TAG), node.value
    if tag == "null":
        return None
    if tag == "bool" and _BOOL.match(text):
        return text.lower() == "true"
    if tag in ("int", "float") and (_INT.match(text) or _FLOAT.match(text)):
        return _number(text)
    return text


def _number(text: str) -> int | float:
    if _INT.match(text) and len(text) < 1000:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    word = text.lower().lstrip("+-")
    if word in (".inf", ".nan"):
        return -math.inf if text[0] == "-" else float(word[1:])
    return float(text)


def _expected(kind) -> str:
    words = {float: "a number", int: "an integer", bool: "true or false", str: "text", NoneType: "null"}
    if kind in words:
        return words[kind]
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return ("one of " if len(parts) > 1 else "") + ", ".join(f"'{part}'" for part in parts)
    if get_origin(kind) is tuple:
        return f"a list [{', '.join(_expected(part) for part in parts)}]"
    return " or ".join(_expected(part) for part in parts)


def _got(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return f"a list of {len(node.value)}"
    if isinstance(node, yaml.MappingNode):
        return "a section of keys"
    value, words = _scalar(node), " ".join(node.value.split())
    short = words if len(words) <= 60 else words[:57] + "..."
    return "null" if value is None else f"the text '{short}'" if isinstance(value, str) else short


def _build(cls, values: dict, prefix: str):
    arguments = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            arguments[field.name] = _build(field.type, values, name + ".")
        elif name in values:
            arguments[field.name] = values[name]
    return cls(**arguments)


# Unknown keys


def _sections(cls, prefix: str = "") -> dict[str, list[str]]:
    """Dotted section name ('' is the top level) -> its keys."""
    sections = {prefix: [field.name for field in dataclasses.fields(cls)]}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            sections |= _sections(field.type, f"{prefix}.{field.name}".lstrip("."))
    return sections


def _unknown_key(root, section: str, key: str) -> str:
    """What to say about `key`, which is not in `section`."""
    sections = _sections(root)
    dotted = f"{section}.{key}".lstrip(".")
    if "." in key:
        return f"unknown key '{dotted}'; in a file write sections as YAML mappings, not with dots"
    here = f"'{section}'" if section else "the top level"
    homes = [name for name, keys in sections.items() if key in keys and name != section]
    if homes:
        names = _either([f"'{name}'" if name else "the top level" for name in homes])
        write = _either([f"{name}.{key}".lstrip(".") for name in homes])
        return f"'{key}' is not a key of {here}; it belongs to {names} (write {write})"
    keys = sections[section] + ([] if section else ["base"])
    distances = {candidate: edit_distance(key, candidate) for candidate in keys}
    best = min(distances.values())
    if best > max(2, len(key) // 2):
        return f"unknown key '{dotted}'; the keys of {here} are: {', '.join(keys)}"
    nearest = [f"{section}.{candidate}".lstrip(".") for candidate in keys if distances[candidate] == best]
    return f"unknown key '{dotted}'; nearest: " + ", ".join(f"'{name}'" for name in nearest)


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance: single-letter insertions, deletions and replacements."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]
