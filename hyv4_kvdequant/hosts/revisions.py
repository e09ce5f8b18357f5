"""Which revision of a host's code this is: exact signatures by version, from the imported class or from its source.

A method that we wrap or call is known by its whole signature. One argument more, even with a default, is one that we
would drop, so it is another revision and no known one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Revision:
    """One known state of a host's class.

    Attributes:
        versions: the releases that have it, for people: `0.31.0 to 0.33.0`.
        signatures: {method: parameters without annotations, as `signature_text` writes them}.
    """

    versions: str
    signatures: Mapping[str, str]


def match_revision(found: Mapping[str, str | None], known: Sequence[Revision], owner: str) -> Revision | str:
    """The revision whose signatures are all equal to those found, or a sentence that says what is not.

    Args:
        found: {method: its signature, None where there is no such method}.
        known: the revisions, oldest first.
        owner: the class's name, for the sentence.
    """
    for revision in reversed(known):
        if all(found.get(name) == signature for name, signature in revision.signatures.items()):
            return revision
    return " ".join(_differences(found, known, owner))


def _differences(found: Mapping[str, str | None], known: Sequence[Revision], owner: str) -> list[str]:
    problems = []
    for name in known[-1].signatures:
        # A signature once, with all versions that have it, newest first.
        expected = list(dict.fromkeys(revision.signatures[name] for revision in reversed(known)))
        given = found.get(name)
        if given is None:
            problems.append(f"{owner} has no method {name}.")
        elif given not in expected:
            forms = " or ".join(f"({form})" for form in expected)
            problems.append(f"{owner}.{name} takes ({given}), expected {forms}.")
    if not problems:
        every = "; ".join(f"{name}({found[name]})" for name in known[-1].signatures)
        problems.append(f"each method of {owner} is one that we know, but not together: {every}.")
    return problems


def signature_text(function: Callable[..., Any]) -> str:
    """A function's parameters without annotations: `self, q, out=None`."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


def class_signatures(owner: type[Any], methods: Sequence[str]) -> dict[str, str | None]:
    """The signatures of an imported class's methods, inherited ones included."""
    found = {name: getattr(owner, name, None) for name in methods}
    return {name: signature_text(method) if callable(method) else None for name, method in found.items()}


def source_signatures(sources: Sequence[tuple[str, str]], methods: Sequence[str]) -> dict[str, str | None]:
    """As `class_signatures`, read off source text, so that nothing of the host is imported.

    Args:
        sources: (source text, class name) of the class and then of its bases, in the order of inheritance.
        methods: the methods' names.
    """
    found: dict[str, str | None] = dict.fromkeys(methods)
    for text, class_name in sources:
        for function in _functions(ast.parse(text), class_name):
            if function.name in found and found[function.name] is None:
                found[function.name] = _source_signature(function.args)
    return found


def _functions(tree: ast.Module, class_name: str) -> list[ast.FunctionDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    return [node for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)]


def _source_signature(arguments: ast.arguments) -> str:
    given = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for argument in given:
        if argument is not None:
            argument.annotation = None
    # `ast` writes defaults as `name=default`, as `inspect` does for parameters without annotations.
    return ast.unparse(arguments)
