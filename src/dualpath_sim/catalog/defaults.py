"""What a key is worth that a ``config.json`` leaves out: the defaults of transformers' classes.

Published files often leave out keys that equal the defaults of their family's configuration class.
Where transformers is installed, its classes are read from their source files, since importing them
takes seconds.  ``defaults.json`` has the same for the families that the catalog reads, and is used
where transformers is missing or does not have a family:

    python -m dualpath_sim.catalog.defaults     writes defaults.json from the installed transformers
"""

import ast
import importlib.util
import json
import operator
from collections.abc import Collection
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

from dualpath.node.output_files import write_whole

_TABLE = "defaults.json"


class Defaults(msgspec.Struct, frozen=True):
    """The literal defaults of a family's configuration class, by key.

    ``aliases`` maps other names that the class accepts for a key to the name that it declares.
    """

    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}

    def only(self, keys: Collection[str]) -> "Defaults":
        """Return the defaults of some keys, except None."""
        return Defaults(
            {k: v for k, v in sorted(self.values.items()) if k in keys and v is not None},
            {a: k for a, k in sorted(self.aliases.items()) if k in keys},
        )


class _Table(msgspec.Struct, frozen=True):
    transformers: str
    families: dict[str, Defaults]


@cache
def _table() -> _Table:
    file = resources.files("dualpath_sim.catalog") / _TABLE
    return msgspec.json.decode(file.read_bytes(), type=_Table)


@cache
def defaults_of(model_type: str) -> Defaults:
    """Return a family's defaults: the installed transformers', else the table's, else none."""
    stored = stored_defaults(model_type)
    own = installed_defaults(model_type) or Defaults()
    return Defaults({**stored.values, **own.values}, {**stored.aliases, **own.aliases})


def stored_defaults(model_type: str) -> Defaults:
    """Return what the table has of a family."""
    return _table().families.get(model_type, Defaults())


def installed_defaults(model_type: str) -> Defaults | None:
    """Return what the installed transformers declares for a family, None if it does not."""
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return None
    folder = model_type.removesuffix("_text")
    models = Path(package.submodule_search_locations[0]) / "models"
    file = models / folder / f"configuration_{folder}.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assigned = _assigned(node)
            if assigned.get("model_type") == model_type:
                return _declared(assigned)
    return None


def _declared(assigned: dict[str, Any]) -> Defaults:
    names = assigned.pop("attribute_map", {})
    assigned.pop("model_type")
    aliases = {}
    for one, other in names.items() if isinstance(names, dict) else ():
        # Of the two names of a key one is a field of the class.
        declared, alias = (one, other) if one in assigned else (other, one)
        aliases[alias] = declared
    return Defaults(assigned, aliases)


def _assigned(node: ast.ClassDef) -> dict[str, Any]:
    """Return the literals that a class assigns to its fields."""
    found: dict[str, Any] = {}
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case _:
                continue
        try:
            found[name] = _literal(value)
        except ValueError:
            continue
    return found


_OPERATORS = {ast.Mult: operator.mul, ast.Pow: operator.pow}


def _literal(node: ast.expr) -> Any:  # noqa: ANN401
    """Return a literal's value, also of products like ``4096 * 32``; raises ``ValueError``."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_literal(node.left), _literal(node.right))
    return ast.literal_eval(node)


def main() -> None:
    """Write the table from the installed transformers."""
    from dualpath_sim.catalog.families import CONFIG_KEYS, DEFAULTS_OF_FAMILIES

    families = {}
    for name in sorted(set(DEFAULTS_OF_FAMILIES.values())):
        declared = installed_defaults(name)
        if declared is None:
            raise SystemExit(f"the installed transformers has no configuration class of {name}")
        families[name] = declared.only(CONFIG_KEYS)
    table = _Table(metadata.version("transformers"), families)
    text = json.dumps(msgspec.to_builtins(table), indent=1, sort_keys=True)
    write_whole(Path(__file__).with_name(_TABLE), f"{text}\n".encode())


if __name__ == "__main__":
    main()
