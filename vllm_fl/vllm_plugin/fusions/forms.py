# SPDX-License-Identifier: Apache-2.0
"""Recognising a module by what its forward does, as it stands in its source.

Two forwards are of one form where they differ in nothing but the names of their variables and of
the module's attributes, in comments and in annotations. The names of the parameters count: callers
give them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from types import FunctionType
from typing import Any

__all__ = ["QK_NORM_ROPE", "forward_in", "forward_of", "names_in"]

QK_NORM_ROPE = (
    # Qwen3 and Qwen3-MoE
    """
def forward(self, positions, hidden_states):
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    q_by_head = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
    q_by_head = self.q_norm(q_by_head)
    q = q_by_head.view(q.shape)
    k_by_head = k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
    k_by_head = self.k_norm(k_by_head)
    k = k_by_head.view(k.shape)
    q, k = self.rotary_emb(positions, q, k)
    attn_output = self.attn(q, k, v)
    output, _ = self.o_proj(attn_output)
    return output
""",
    # Apertus
    """
def forward(self, positions, hidden_states):
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    q = self.q_norm(q.view(-1, self.num_heads, self.head_dim)).view_as(q)
    k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim)).view_as(k)
    q, k = self.rotary_emb(positions, q, k)
    attn_output = self.attn(q, k, v)
    output, _ = self.o_proj(attn_output)
    return output
""",
)
"""An attention module that norms the heads of query and key and rotates them. Its attributes are
called here as they are called by whoever asks for `names_in`."""


class _Normal(ast.NodeTransformer):
    """Renames the variables of a function, and the attributes of its first parameter, in the
    order in which they first stand there."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        self.kept = {a.arg for a in (*arguments.posonlyargs, *arguments.args)}
        self.own = next((a.arg for a in arguments.args), "")
        assigned = (n for n in ast.walk(function) if isinstance(n, ast.Name))
        self.local = {n.id for n in assigned if isinstance(n.ctx, ast.Store)} - self.kept
        self.variables: dict[str, str] = {}
        self.attributes: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.local:
            node.id = self.variables.setdefault(node.id, f"v{len(self.variables)}")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == self.own:
            node.attr = self.attributes.setdefault(node.attr, f"a{len(self.attributes)}")
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def _normal(function: ast.FunctionDef) -> tuple[str, tuple[str, ...]]:
    """The text that all forwards of a form have, and the attributes in order of appearance."""
    function = ast.parse(ast.unparse(function)).body[0]  # type: ignore[assignment]
    function.returns = None
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del function.body[0]  # the docstring
    normal = _Normal(function)
    normal.visit(function)
    return ast.dump(function), tuple(normal.attributes)


def _parsed(source: str) -> ast.FunctionDef:
    function = ast.parse(textwrap.dedent(source)).body[0]
    if not isinstance(function, ast.FunctionDef):
        raise ValueError("not a plain function")
    return function


def names_in(function: ast.FunctionDef, forms: tuple[str, ...]) -> Mapping[str, str] | None:
    """What a forward's attributes are called, by the names that its form gives them; None where
    it is of none of the forms."""
    found, attributes = _normal(function)
    for form in forms:
        text, names = _normal(_parsed(form))
        if found == text:
            return dict(zip(names, attributes, strict=True))
    return None


def forward_in(cls: ast.ClassDef) -> ast.FunctionDef | None:
    """The forward that a class's body defines."""
    found = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
    return found[-1] if found else None


def forward_of(cls: type) -> tuple[type, ast.FunctionDef] | str:
    """The class that a class has its forward from, and that forward as vLLM wrote it; or why that
    is not known."""
    owner = next((base for base in cls.__mro__ if "forward" in vars(base)), None)
    if owner is None:
        return "it has no forward"
    function: Any = vars(owner)["forward"]
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return f"the forward of {owner.__name__} is wrapped"
    if (function.__module__, function.__qualname__) != (
        owner.__module__,
        f"{owner.__qualname__}.forward",
    ):
        return f"{function.__module__}.{function.__qualname__} replaced its forward"
    try:
        return owner, _parsed(inspect.getsource(function))
    except (OSError, ValueError, SyntaxError) as error:
        return f"the source of its forward cannot be read: {error}"
