"""From a YAML file and `key=value` overrides to a checked pydantic model, and from a validation error to one line.

* Nothing here knows a particular option: the schema is an argument, and the right names come from it.
* YAML is read by omegaconf, so `1e-3` is a number (plain YAML 1.1 reads text), duplicate keys are errors, and a
  value may refer to another one as `${train.sequence_length}`.
* An override replaces the whole value of its option, also where that is a list or a mapping.
* Unknown names are reported before missing ones: the usual cause of a missing option is a misspelt one.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from ..errors import InputError

SchemaT = TypeVar("SchemaT", bound=BaseModel)
Location = tuple[int | str, ...]

UNKNOWN = ("extra_forbidden", "invalid_key")
OPTION_NAME = re.compile(r"\w+(\.\w+|\[\d+\])*")
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of options",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def load_yaml(schema: type[SchemaT], path: str | Path, overrides: Sequence[str] = ()) -> SchemaT:
    """Read `path`, apply the overrides in order (the last one wins) and check the result against `schema`.

    Raises InputError, one line, for a file that cannot be read or parsed, an override that is not `key=value`, an
    unknown option (with the nearest right name), a value of the wrong type or range, or a failed cross-field check.
    """
    config = _read_mapping(Path(path))
    for override in overrides:
        _apply_override(config, override)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {_one_line(error)}") from error
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        problem = next((p for p in problems if p["type"] in UNKNOWN), problems[0])
        others = len(problems) - 1
        more = f" (and {others} more problem{'s' if others > 1 else ''})" if others else ""
        raise InputError(f"{_origin(problem, path, overrides)}: {_message(schema, problem)}{more}") from error


def dump_yaml(config: BaseModel) -> str:
    """`config` as YAML text that `load_yaml` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def option_names(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted names of all options of `schema`, a section before its own options, in order of definition."""
    names = []
    for name, field in schema.model_fields.items():
        names.append(prefix + name)
        nested = _nested_model(field.annotation, inside_lists=False)
        if nested is not None:
            names += option_names(nested, f"{prefix}{name}.")
    return names


def dotted(location: Location) -> str:
    """('data', 'train', 0, 'prefix') as `data.train[0].prefix`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like `name`, or None if none is near."""
    matches = difflib.get_close_matches(name.casefold(), [candidate.casefold() for candidate in candidates], n=1)
    return next((candidate for candidate in candidates if matches and candidate.casefold() == matches[0]), None)


def _read_mapping(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise InputError(f"configuration file {path} does not exist") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder, not a configuration file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file (byte {error.start} is not UTF-8)") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {_yaml_problem(error)}") from error
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {_one_line(error)}") from error
    except OSError as error:  # no permission, or (omegaconf's choice) a file that holds a single number
        raise InputError(f"cannot read {path} as a mapping of options: {error.strerror or error}") from error
    if not isinstance(config, DictConfig):
        raise InputError(f"{path} holds a list where a mapping of options is expected")
    if not config:
        raise InputError(f"{path} is empty: write at least the required options, see configs/")
    return config


def _apply_override(config: DictConfig, override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"override '{override}' has no '=': write key=value, for example train.steps=100")
    if not OPTION_NAME.fullmatch(name):
        raise InputError(f"override '{override}': '{name}' is not an option name, write it like train.steps=100")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        OmegaConf.update(config, name, parsed["value"], merge=False, force_add=True)
    except yaml.YAMLError as error:
        raise InputError(f"override '{override}' is not valid YAML after '=': {_yaml_problem(error)}") from error
    except (OmegaConfBaseException, ValueError, TypeError) as error:  # a list index out of range or not a number
        raise InputError(f"override '{override}': {_one_line(error)}") from error


def _origin(problem: Any, path: str | Path, overrides: Sequence[str]) -> str:
    """Where the offending value was written: the last override that set it, or else the file."""
    option, is_check = dotted(problem["loc"]), problem["type"] == "value_error"
    for override in reversed(overrides):
        name = re.sub(r"\.(\d+)(?=\.|\[|$)", r"[\1]", override.partition("=")[0])
        if _contains(name, option) or (not is_check and _contains(option, name)):
            return f"override '{override}'"
    return f"{path} with overrides" if overrides and is_check else str(path)


def _contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _message(schema: type[BaseModel], problem: Any) -> str:
    """The problem in words: the option, what is wrong and, where it can be told, the remedy."""
    kind, location = problem["type"], problem["loc"]
    option = dotted(location) or "the file"
    if kind == "value_error":  # raised by a check of the schema, whose message names its options itself
        return str(problem["ctx"]["error"])
    if kind in UNKNOWN:
        return _unknown_option(schema, (*location[:-1], str(location[-1])))
    if kind == "missing":
        return f"{option} is required but missing"
    return f"{option} {_requirement(problem)}{_hint(schema, location)}"


def _requirement(problem: Any) -> str:
    """What the value should have been, and what it is."""
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    found = _describe(value)
    if kind in EXPECTED:
        return f"must be {EXPECTED[kind]}, but is {found}{_type_remedy(kind, value)}"
    if kind in BOUNDS:
        words, key = BOUNDS[kind]
        bound = context[key] if isinstance(context[key], int) else f"{context[key]:g}"
        return f"must be {words} {bound}, but is {found}"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in re.split(r", | or ", context["expected"])]
        guess = nearest(value, choices) if isinstance(value, str) else None
        return f"must be one of {', '.join(choices)}, but is {found}" + (f"; did you mean {guess}?" if guess else "")
    return f"is {found}: {problem['msg']}"


def _type_remedy(kind: str, value: object) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    if (
        kind in ("int_type", "float_type")
        and isinstance(value, str)
        and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value)
    ):
        return ": remove the quotes"
    if kind == "list_type" and isinstance(value, dict):
        return ": write all of it in brackets, [...]"
    if kind == "string_type" and isinstance(value, int | float):
        return ": put it in quotes"
    return ""


def _describe(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return f"the text '{value}'"
    return "a list" if isinstance(value, list | tuple) else "a mapping"


def _hint(schema: type[BaseModel], location: Location) -> str:
    """The description that the schema gives the option, as a remedy."""
    field = None
    model: type[BaseModel] | None = schema
    for part in location:
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = _nested_model(field.annotation) if field else None
    return f" ({field.description})" if field is not None and field.description else ""


def _unknown_option(schema: type[BaseModel], location: Location) -> str:
    """Name the unknown option and the nearest right name: first the same name elsewhere, then a like one nearby."""
    model: type[BaseModel] = schema
    for part in location[:-1]:
        if isinstance(part, str):
            model = _nested_model(model.model_fields[part].annotation) or model
    leaf, section = str(location[-1]), dotted(location[:-1])
    everywhere = option_names(schema)
    guess = next((name for name in everywhere if name.rpartition(".")[2] == leaf), None)
    if guess is None:
        sibling = nearest(leaf, list(model.model_fields))
        guess = f"{section}.{sibling}".lstrip(".") if sibling else None
    if guess is None:
        like = nearest(leaf, [name.rpartition(".")[2] for name in everywhere])
        guess = next((name for name in everywhere if name.rpartition(".")[2] == like), None)
    if guess is None:
        return f"unknown option {dotted(location)}; {section or 'the top level'} has {', '.join(model.model_fields)}"
    return f"unknown option {dotted(location)}; did you mean {guess}?"


def _nested_model(annotation: object, inside_lists: bool = True) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) is list and not inside_lists:
        return None
    parts = typing.get_args(annotation)
    return next((model for part in parts if (model := _nested_model(part, inside_lists))), None)


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
