"""Which fields of which classes the product reads: found in its source, without running it.

Types are followed through annotations, assignments, attributes, calls and loops. The type of an
expression is the set of the product's classes that its value may be, or hold: that of
`dict[str, SecretSource]` is `SecretSource`, so what loops over it reads fields of that class.

A value that is only handed to the constructor of another class is read where that class's field
is. What a class of settings reads of itself counts where the method that reads it is used.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Links in perdure/ lead to four of them, and a search does not follow links.
PACKAGES = tuple(f"perdure/{name}" for name in ("", "flows", "tasks", "training", "storage"))
ROOT = Path(__file__).parents[3]
PASSES = 3  # attributes that are set in one module and used in the next need several

Types = frozenset[str]
NOTHING: Types = frozenset()
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
Member = tuple[str, str]  # a class or module, and a name in it


@dataclass(slots=True)
class ClassInfo:
    """A class of the product: what it inherits from, and what is known of its attributes."""

    name: str
    module: str
    node: ast.ClassDef
    bases: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    attributes: dict[str, Types] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Read:
    """A member that is read, or a function that is named.

    Attributes:
        what: the member.
        where: the function or method that does it.
        becomes: the field of another class that it is handed to, and nothing else.
    """

    what: Member
    where: Member
    becomes: Member | None = None


@dataclass(slots=True)
class Product:
    """The whole source: classes, functions, and what reads what."""

    classes: dict[str, ClassInfo] = field(default_factory=dict)
    functions: dict[str, Types] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    variables: dict[str, Types] = field(default_factory=dict)
    reads: set[Read] = field(default_factory=set)

    def resolve(self, module: str, name: str) -> str | None:
        """What a name of a module stands for, through imports of imports."""
        seen = set()
        while (module, name) not in seen:
            seen.add((module, name))
            known = self.names.get(module, {}).get(name)
            if known is None:
                return None
            if known in self.classes or known in self.functions or known in self.names:
                return known
            module, _, name = known.rpartition(".")
        return known

    def types_in(self, module: str, annotation: ast.expr | None) -> Types:
        """The classes that an annotation mentions."""
        found: set[str] = set()
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                try:
                    found |= self.types_in(module, ast.parse(node.value, mode="eval").body)
                except SyntaxError:
                    continue
            qualified = self.resolve(module, node.id) if isinstance(node, ast.Name) else None
            if qualified in self.classes:
                found.add(qualified)
            elif qualified is not None:
                found |= self.variables.get(qualified, NOTHING)  # an alias of a type
        return frozenset(found)

    def with_bases(self, name: str) -> Iterator[ClassInfo]:
        """A class, and what it inherits from."""
        info = self.classes.get(name)
        if info is not None:
            yield info
            for base in info.bases:
                yield from self.with_bases(base)

    def owner(self, name: str, member: str) -> ClassInfo | None:
        """The class that has a member, itself or one that it inherits from."""
        for info in self.with_bases(name):
            if member in info.attributes or member in info.methods:
                return info
        return None


def product(root: Path = ROOT, packages: Collection[str] = PACKAGES) -> Product:
    """The source below a folder, read."""
    found = Product()
    trees: dict[str, ast.Module] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    for name, tree in trees.items():
        _declare(found, name, tree)
    for name, tree in trees.items():
        _note_aliases(found, name, tree)
    for name, tree in trees.items():
        _describe(found, name, tree)
    for _ in range(PASSES):
        found.reads.clear()
        for name, tree in trees.items():
            _Reader(found, name).visit_module(tree)
    return found


def _declare(found: Product, module: str, tree: ast.Module) -> None:
    names = found.names.setdefault(module, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                names[one.asname or one.name] = f"{node.module}.{one.name}"
        elif isinstance(node, ast.Import):
            for one in node.names:
                names[one.asname or one.name.partition(".")[0]] = one.name
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            qualified = f"{module}.{node.name}"
            names[node.name] = qualified
            found.classes[qualified] = ClassInfo(qualified, module, node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = f"{module}.{node.name}"
            found.functions[f"{module}.{node.name}"] = NOTHING
        else:
            for target in _assigned(node):
                names.setdefault(target, f"{module}.{target}")


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def _note_aliases(found: Product, module: str, tree: ast.Module) -> None:
    """Types that have a name, such as `AnyJob = Job | JobTemplate`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            is_type = isinstance(node.value, (ast.Subscript, ast.BinOp))
            types = found.types_in(module, node.value) if is_type else NOTHING
            found.variables[f"{module}.{node.targets[0].id}"] = types


def _describe(found: Product, module: str, tree: ast.Module) -> None:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.functions[f"{module}.{node.name}"] = found.types_in(module, node.returns)
        elif isinstance(node, ast.ClassDef):
            _describe_class(found, found.classes[f"{module}.{node.name}"])


def _describe_class(found: Product, info: ClassInfo) -> None:
    for base in info.node.bases:
        for node in ast.walk(base):
            name = found.resolve(info.module, node.id) if isinstance(node, ast.Name) else None
            if name in found.classes:
                info.bases.append(name)
    for node in info.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            info.fields.append(node.target.id)
            info.attributes[node.target.id] = found.types_in(info.module, node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            info.methods[node.name] = node


class _Reader(ast.NodeVisitor):
    """Walks one module, and records what its functions read."""

    def __init__(self, found: Product, module: str) -> None:
        self.found = found
        self.module = module
        self.where: Member = (module, "")
        self.of_class: ClassInfo | None = None
        self.scopes: list[dict[str, Types]] = [{}]

    def visit_module(self, tree: ast.Module) -> None:
        self._body(tree.body)
        for name, types in self.scopes[0].items():
            known = self.found.variables.get(f"{self.module}.{name}", NOTHING)
            self.found.variables[f"{self.module}.{name}"] = known | types

    def generic_visit(self, node: ast.AST) -> Types:
        """What parts of an expression are; of a statement nobody asks."""
        types = NOTHING
        for child in ast.iter_child_nodes(node):
            types |= self.visit(child)
        return types

    def visit_Assign(self, node: ast.Assign) -> Types:
        types = self.visit(node.value)
        for target in node.targets:
            self._bind(target, types)
        return NOTHING

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Types:
        known = self.found.types_in(self.module, node.annotation)
        value = self.visit(node.value) if node.value is not None else NOTHING
        self._bind(node.target, known | value)
        return NOTHING

    def visit_For(self, node: ast.For | ast.AsyncFor) -> Types:
        self._bind(node.target, self.visit(node.iter))
        self._body(node.body + node.orelse)
        return NOTHING

    visit_AsyncFor = visit_For  # noqa: N815 a name of ast

    def visit_withitem(self, node: ast.withitem) -> Types:
        types = self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._bind(node.optional_vars, types)
        return NOTHING

    def _body(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Match(self, node: ast.Match) -> Types:
        subject = self.visit(node.subject)
        for case in node.cases:
            for pattern in ast.walk(case.pattern):
                if isinstance(pattern, (ast.MatchAs, ast.MatchStar)) and pattern.name:
                    inner = getattr(pattern, "pattern", None)
                    own = self.visit(inner.cls) if isinstance(inner, ast.MatchClass) else NOTHING
                    self.scopes[-1][pattern.name] = own or subject
                if isinstance(pattern, ast.MatchClass):
                    for attribute in pattern.kwd_attrs:
                        self._record(self.visit(pattern.cls), attribute)
            if case.guard is not None:
                self.visit(case.guard)
            self._body(case.body)
        return NOTHING

    def visit_ClassDef(self, node: ast.ClassDef) -> Types:
        outer = self.of_class
        self.of_class = self.found.classes.get(f"{self.module}.{node.name}", outer)
        self.scopes.append({})
        self._body(node.body)
        self.scopes.pop()
        self.of_class = outer
        return NOTHING

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Types:
        is_inner = bool(self.where[1])
        before = self.where
        if not is_inner:
            of = self.of_class.name if self.of_class is not None else self.module
            self.where = (of, node.name)
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        scope: dict[str, Types] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for one in arguments:
            scope[one.arg] = self.found.types_in(self.module, one.annotation)
        if self.of_class is not None and arguments and arguments[0].arg in ("self", "cls"):
            scope[arguments[0].arg] = frozenset({self.of_class.name})
        self.scopes.append(scope)
        self._body(node.body)
        self._body(node.body)  # a name may be used above where it is known what it is
        self.scopes.pop()
        self.where = before
        return NOTHING

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _bind(self, target: ast.expr, types: Types) -> None:
        match target:
            case ast.Name():
                known = self.scopes[-1].get(target.id, NOTHING)
                self.scopes[-1][target.id] = known | types
            case ast.Tuple() | ast.List():
                for one in target.elts:
                    self._bind(one, types)
            case ast.Starred():
                self._bind(target.value, types)
            case ast.Attribute():
                for owner in self.visit(target.value):
                    info = self.found.classes[owner]
                    known = info.attributes.get(target.attr, NOTHING)
                    info.attributes[target.attr] = known | types
            case _:
                self.visit(target)

    def visit_Name(self, node: ast.Name) -> Types:
        for scope in reversed(self.scopes):
            if node.id in scope:
                return scope[node.id]
        qualified = self.found.resolve(self.module, node.id)
        if qualified is None:
            return NOTHING
        if qualified in self.found.classes:
            return frozenset({qualified})
        self._note_function(qualified)
        return self.found.variables.get(qualified, NOTHING)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Types:
        types = self.visit(node.value)
        self._bind(node.target, types)
        return types

    def visit_Compare(self, node: ast.Compare) -> Types:
        self.generic_visit(node)
        return NOTHING

    def visit_Lambda(self, node: ast.Lambda) -> Types:
        return self.visit(node.body)

    def _note_function(self, qualified: str) -> None:
        if qualified in self.found.functions:
            module, _, name = qualified.rpartition(".")
            self.found.reads.add(Read((module, name), self.where))

    def visit_Attribute(self, node: ast.Attribute, becomes: Member | None = None) -> Types:
        if isinstance(node.value, ast.Name):
            module = self.found.resolve(self.module, node.value.id)
            if module in self.found.names:
                self._note_function(f"{module}.{node.attr}")
                qualified = self.found.resolve(module, node.attr)
                is_class = qualified in self.found.classes
                return frozenset({str(qualified)}) if is_class else NOTHING
        return self._record(self.visit(node.value), node.attr, becomes)

    def _record(self, types: Types, name: str, becomes: Member | None = None) -> Types:
        """The type of a member; of what is no member, such as `values` of a dict, the same."""
        found, is_known = NOTHING, False
        for one in types:
            info = self.found.owner(one, name)
            if info is None:
                continue
            is_known = True
            self.found.reads.add(Read((info.name, name), self.where, becomes))
            if name in info.methods:
                returns = info.methods[name].returns
                found |= self.found.types_in(info.module, returns)
                if isinstance(returns, ast.Name) and returns.id == "Self":
                    found |= frozenset({one})
            found |= info.attributes.get(name, NOTHING)
        return found if is_known else types

    def visit_Call(self, node: ast.Call) -> Types:
        called = self._called(node.func)
        info = self.found.classes.get(called) if called is not None else None
        if info is not None:
            self._construct(info, node)
            return frozenset({info.name})
        types = NOTHING if called is not None else self.visit(node.func)
        is_method = isinstance(node.func, ast.Attribute)
        given = NOTHING
        for argument in node.args:
            given |= self.visit(argument)
        for keyword in node.keywords:
            given |= self.visit(keyword.value)
        if called is not None:
            self._note_function(called)
            return self.found.functions[called]
        # What is not of the product, such as sorted(), gives back what it is given.
        return types if is_method else types | given

    def _called(self, node: ast.expr) -> str | None:
        """The class or function of the product that is called by its name."""
        qualified = None
        if isinstance(node, ast.Name) and not any(node.id in scope for scope in self.scopes[1:]):
            qualified = self.found.resolve(self.module, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.found.resolve(self.module, node.value.id)
            if module in self.found.names:
                qualified = self.found.resolve(module, node.attr)
        is_known = qualified in self.found.classes or qualified in self.found.functions
        return qualified if is_known else None

    def _construct(self, info: ClassInfo, node: ast.Call) -> None:
        fields = [name for one in self.found.with_bases(info.name) for name in one.fields]
        for index, argument in enumerate(node.args):
            name = info.fields[index] if index < len(info.fields) else None
            self._give(argument, (info.name, name) if name is not None else None)
        for keyword in node.keywords:
            name = keyword.arg
            owner = self.found.owner(info.name, name) if name in fields else None
            self._give(keyword.value, (owner.name, str(name)) if owner is not None else None)

    def _give(self, value: ast.expr, to: Member | None) -> None:
        """A value that a field gets; what a function there is called with, its type says."""
        if isinstance(value, ast.Attribute):
            self.visit_Attribute(value, to)
        elif isinstance(value, ast.IfExp):
            self.visit(value.test)
            self._give(value.body, to)
            self._give(value.orelse, to)
        elif isinstance(value, ast.Lambda) and to is not None:
            types = self.found.classes[to[0]].attributes[to[1]]
            self.scopes.append({one.arg: types for one in value.args.args})
            self.visit(value.body)
            self.scopes.pop()
        else:
            self.visit(value)

    def _comprehension(self, node: Comprehension) -> Types:
        self.scopes.append({})
        for one in node.generators:
            self._bind(one.target, self.visit(one.iter))
            for condition in one.ifs:
                self.visit(condition)
        parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        types = frozenset().union(*(self.visit(part) for part in parts))
        self.scopes.pop()
        return types

    visit_ListComp = visit_SetComp = _comprehension  # noqa: N815
    visit_GeneratorExp = visit_DictComp = _comprehension  # noqa: N815


def with_reader(
    found: Product, *, settings: Collection[str], advice: Collection[Member] = ()
) -> frozenset[Member]:
    """The members that are read by something that acts on them.

    Args:
        found: the source.
        settings: classes of settings; what they and their modules read of themselves counts where
            it is used elsewhere. A validator is used by nobody: what it alone reads decides
            nothing but whether the settings are accepted.
        advice: functions, or whole modules (`*`), that only say what a setting is.
    """
    inside = {*settings, *(found.classes[name].module for name in settings)}
    acting = [
        read
        for read in found.reads
        if read.where not in advice and (read.where[0], "*") not in advice
    ]
    live: set[Member] = set()
    while True:
        more = {
            read.what
            for read in acting
            if read.what not in live
            and (read.where[0] not in inside or not read.where[1] or read.where in live)
            and (read.becomes is None or read.becomes in live)
        }
        if not more:
            return frozenset(live)
        live |= more
