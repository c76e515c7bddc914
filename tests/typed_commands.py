"""All commands of `dualpath` with their flags, found by introspection, and how each is typed."""

import argparse
import re
from collections.abc import Iterator
from typing import NamedTuple

from dualpath.cli.main import command_module, subcommands

_PATHS = re.compile(r"\b(PATH|FILE|DIR|FOLDER|MODEL|STORAGE)\b|\.(toml|jsonl?|html|md)\b")


class Command(NamedTuple):
    """A subcommand, or an action of one: its words and its parser."""

    words: tuple[str, ...]
    parser: argparse.ArgumentParser

    @property
    def name(self) -> str:
        return " ".join(self.words)

    def path_arguments(self) -> Iterator[argparse.Action]:
        """Yield the arguments that name files or folders, by their metavars."""
        for action in self.parser._actions:
            if action.nargs != 0 and _PATHS.search(str(action.metavar or action.dest.upper())):
                yield action


def all_commands() -> list[Command]:
    """Return every command that can be typed, without aliases."""
    found: list[Command] = []
    for name in subcommands():
        root = argparse.ArgumentParser(prog="dualpath").add_subparsers()
        module = command_module(name)
        assert module is not None
        module.add_parser(root)
        found += _commands((name,), root.choices[name])
    return found


def _commands(words: tuple[str, ...], parser: argparse.ArgumentParser) -> list[Command]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        return [Command(words, parser)]
    children = {id(child): (name, child) for name, child in reversed(groups[0].choices.items())}
    named = reversed(children.values())
    return [each for name, child in named for each in _commands((*words, name), child)]
