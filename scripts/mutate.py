"""Break one module in many small ways, and see whether the tests notice.

    python scripts/mutate.py omlx/cache/blocks.py -- python -m pytest -qx tests/cache

Each mutant is one small change: a comparison the other way round or off by one, ``and`` for
``or``, a number one too high or too low, a statement left out. The command runs in a copy of the
repository that holds the mutant; one that it does not notice is printed. It shows dead code, a
promise without a test, or a change that makes no difference: which of these, you have to see.
Assertions are left alone. Exits 1 when a mutant survived, 2 when the command fails without one.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "dist", "build", "*.egg-info")

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
SIGNATURE = ("annotation", "returns", "decorator_list", "args", "keywords")


@dataclass(frozen=True)
class Mutant:
    line: int
    what: str
    source: str


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of ``node``."""
    match node:
        case ast.Compare(ops=[operator, *rest]):
            for other in COMPARISONS[type(operator)]:
                yield ast.Compare(node.left, [other(), *rest], node.comparators)
        case ast.BoolOp(op=ast.And()):
            yield ast.BoolOp(ast.Or(), node.values)
        case ast.BoolOp(op=ast.Or()):
            yield ast.BoolOp(ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(operator)](), node.right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call()):
            yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Expr(value=ast.Constant()):
            return  # a docstring
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Continue():
            yield ast.Pass()
        case ast.Return(value=ast.Constant(value=None)):
            return
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))


def places(parent: ast.AST, *, nested: bool = False) -> Iterator[tuple[ast.AST, str, int | None]]:
    """(parent, field, index) of every node that may be changed, from top to bottom.

    Only inside functions: what a module does when it is imported breaks everything at once.
    """
    for field, value in ast.iter_fields(parent):
        if field in SIGNATURE and not isinstance(parent, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert):
                continue
            if nested:
                yield parent, field, index
            inside = nested or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from places(child, nested=inside)


def mutants(source: str) -> list[Mutant]:
    tree = ast.parse(source)
    found: list[Mutant] = []
    for parent, field, index in places(tree):
        value = getattr(parent, field)
        node = value if index is None else value[index]
        for variant in variants(node):
            ast.copy_location(variant, node)
            put(parent, field, index, variant)
            mutated = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
            put(parent, field, index, node)
            what = f"{headline(node)}  ->  {headline(variant)}"
            found.append(Mutant(getattr(node, "lineno", 0), what, mutated))
    return found


def put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def headline(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


class Copies:
    """Copies of the repository, one for each command that runs at a time."""

    def __init__(self, folder: Path, count: int, module: Path, timeout_s: float) -> None:
        self.module = module
        self.timeout_s = timeout_s
        self._free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            target = folder / str(number)
            shutil.copytree(ROOT, target, ignore=LEFT_OUT)
            self._free.put(target)

    def noticed(self, source: str, command: list[str]) -> bool:
        """Whether the command fails, or runs for too long, with ``source`` as the module."""
        place = self._free.get()
        try:
            (place / self.module).write_text(source, "utf-8")
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(
                command,
                cwd=place,
                env=environment,
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
            )
            return done.returncode != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            self._free.put(place)


def main() -> int:
    parser = argparse.ArgumentParser(description="Break one module and see what tests notice.")
    parser.add_argument("module", type=Path, help="path of the module, from the repository's root")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", type=int, help="try only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--lines", help="try only mutants of these lines: FIRST-LAST")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds; longer is noticed")
    parser.add_argument("command", nargs="+", help="what to run, behind --")
    options = parser.parse_args()

    original = (ROOT / options.module).read_text("utf-8")
    chosen = mutants(original)
    if options.lines:
        first, last = map(int, options.lines.split("-"))
        chosen = [mutant for mutant in chosen if first <= mutant.line <= last]
    if options.sample and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
        chosen.sort(key=lambda mutant: mutant.line)

    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(Path(folder), options.jobs, options.module, options.timeout)
        if copies.noticed(original, options.command):
            print("the command fails without any mutant", file=sys.stderr)
            return 2
        with ThreadPoolExecutor(options.jobs) as pool:
            noticed = pool.map(
                lambda mutant: copies.noticed(mutant.source, options.command), chosen
            )
            survived = 0
            for mutant, was_noticed in zip(chosen, noticed, strict=True):
                if not was_noticed:
                    survived += 1
                    print(f"{options.module}:{mutant.line}: {mutant.what}", flush=True)
    print(f"{survived} of {len(chosen)} mutants survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
