"""Where the source reads the fields of a value by their place: an index, a slice, or an unpacking.

A value is a NamedTuple of the core, or a KVView. What a name holds is told by annotations, by what is called,
and by the fields of other values; nothing else is inferred, so `tuple(zip(call, names))[0]` stays unseen.
"""

import ast
from collections.abc import Iterable, Iterator

from source import Source

FLAT = {"Arguments", "CachedArguments", "WriteArguments"}  # operators take these as one flat list
LISTS = {"inputs", "arguments"}  # the flat list itself, as torch hands it on


class Values:
    """The values that some files define, their fields that are values, and the functions that return one."""

    def __init__(self, sources: Iterable[Source]):
        classes = [node for x in sources for node in ast.walk(x.tree) if isinstance(node, ast.ClassDef)]
        self.names = {
            x.name for x in classes if x.name == "KVView" or "NamedTuple" in map(ast.unparse, x.bases)
        }
        self.fields, self.returns = {}, {}
        for owner, field in ((x, field) for x in classes if x.name in self.names for field in x.body):
            if isinstance(field, ast.AnnAssign):
                self.fields[owner.name, field.target.id] = self.of_annotation(field.annotation)
        for function in (x for source in sources for x in source.functions):
            self.returns.setdefault(function.name, set()).add(self.of_annotation(function.returns))

    def of_annotation(self, node: ast.AST | None) -> str | None:
        """The value that an annotation names, also as ``"Call"`` or ``Call | None``."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self.of_annotation(node.left) or self.of_annotation(node.right)
        return node.id if isinstance(node, ast.Name) and node.id in self.names else None

    def of(self, node: ast.AST, known: dict[str, str]) -> str | None:
        """The value that an expression is, where names are of these values."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.of(node.value, known)
            return self.fields.get(
                (owner or "Call", node.attr)
            )  # by a call's word where the owner is not known
        if isinstance(node, ast.IfExp):
            return self.of(node.body, known) or self.of(node.orelse, known)
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value, known)
        return self._of_call(node, known) if isinstance(node, ast.Call) else None

    def _of_call(self, node: ast.Call, known: dict[str, str]) -> str | None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name == "_replace":
            return self.of(node.func.value, known)
        if name in ("tuple", "list") and len(node.args) == 1:
            return self.of(node.args[0], known)
        returned = self.returns.get(name, {None})
        return name if name in self.names else next(iter(returned)) if len(returned) == 1 else None


def reads_by_place(source: Source, values: Values) -> list[str]:
    """Every place of a file that reads a field of a value, or of operator arguments, by its place."""
    return sorted(_reads(source, values, source.tree, {}, frozenset()))


def _reads(
    source: Source, values: Values, scope: ast.AST, known: dict, lists: frozenset, owner=None
) -> Iterator[str]:
    """Those of a scope, whose outer names are of these values or flat lists, and which may be a method of
    ``owner``.
    """
    inside, inner = _inside(scope)
    known, fixed, lists = dict(known), set(), set(lists)
    if isinstance(scope, ast.FunctionDef | ast.Lambda):
        a = scope.args
        for x in (*a.posonlyargs, *a.args, *a.kwonlyargs):
            known[x.arg] = owner if x.arg == "self" else values.of_annotation(x.annotation)
            fixed.update([x.arg] if x.annotation else [])
        if source.parts[0] == "backends":
            lists.update(
                [a.vararg.arg] if a.vararg else [], LISTS & {x for x in known if known[x] is None} - fixed
            )
    pairs = [pair for node in inside for pair in _bindings(node)]
    for _ in range(3):  # a name may hold what another name holds
        for name, value in ((x.id, y) for x, y in pairs if isinstance(x, ast.Name) and x.id not in fixed):
            known[name] = values.of(value, known) or known.get(name)
    bad = [y for x, y in pairs if isinstance(x, ast.Tuple | ast.List) and values.of(y, known)]
    for node in inside:
        if isinstance(node, ast.Subscript):
            is_list = isinstance(node.value, ast.Name) and node.value.id in lists
            bad += [node] if is_list or values.of(node.value, known) else []
        elif isinstance(node, ast.Starred) and values.of(node.value, known) not in (None, *FLAT):
            bad.append(node)
    yield from (f"{source.path}:{node.lineno}: {ast.unparse(node)}" for node in bad)
    mine = scope.name if isinstance(scope, ast.ClassDef) and scope.name in values.names else None
    for child in inner:
        yield from _reads(source, values, child, known, frozenset(lists), mine)


def _inside(scope: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """The nodes that are in a scope and in none within it; and the scopes directly within it."""
    inside, inner, level = [], [], list(ast.iter_child_nodes(scope))
    while level:
        node = level.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            inner.append(node)
        else:
            inside.append(node)
            level += ast.iter_child_nodes(node)
    return inside, inner


def _bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each target of an assignment with what it gets; tuples on both sides item by item."""
    if isinstance(node, ast.Assign):
        waiting = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        waiting = [(node.target, node.value)]
    else:
        return
    while waiting:
        target, value = waiting.pop()
        both = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
        if both and len(target.elts) == len(value.elts):
            waiting += zip(target.elts, value.elts, strict=True)
        else:
            yield target, value
