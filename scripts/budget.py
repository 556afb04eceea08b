"""How big the project is: lines per file, longest functions, flags, environment names, public names, dependencies.

Informs, never fails. ``--base REF`` adds the difference to another commit.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES, PARAMETERS = 350, 60, 8


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="commit to compare with")
    base = parser.parse_args().base
    files = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
    report_files(files)
    report_functions(files)
    report_surface(files)
    if base:
        report_difference(files, base)


def report_files(files: dict[Path, str]) -> None:
    """Lines by package, and the files past the aim."""
    packages: dict[str, int] = {}
    for path, text in files.items():
        package = path.relative_to(ROOT / "src" / "troth").parts[0].removesuffix(".py")
        packages[package] = packages.get(package, 0) + text.count("\n")
    tests = sum(p.read_text().count("\n") for p in (ROOT / "tests").rglob("*.py"))
    print(f"lines: {sum(packages.values())} in src, {tests} in tests, {len(files)} files")
    for package, lines in sorted(packages.items(), key=lambda item: -item[1]):
        print(f"  {lines:6} {package}")
    for path, text in files.items():
        if text.count("\n") > FILE_LINES:
            print(f"  past {FILE_LINES} lines: {path.relative_to(ROOT)} {text.count(chr(10))}")


def report_functions(files: dict[Path, str]) -> None:
    """The longest functions and those with many parameters."""
    functions = [(path, node) for path, text in files.items() for node in _functions(ast.parse(text))]
    for path, node in functions:
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        parameters = len(node.args.args) + len(node.args.kwonlyargs)
        parameters -= bool(node.args.args and node.args.args[0].arg in ("self", "cls"))
        if lines > FUNCTION_LINES or parameters > PARAMETERS:
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            print(f"  {node.name}: {lines} lines, {parameters} parameters ({place})")
    print(f"functions: {len(functions)}")


def report_surface(files: dict[Path, str]) -> None:
    """Flags, environment names, public classes and functions, dependencies."""
    flags, environment, public = set(), set(), 0
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if path.parent.name == "cli" and node.value.startswith("--"):
                    flags.add(node.value)
                if node.value.startswith("TROTH_") and node.value.isupper():
                    environment.add(node.value)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                public += 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(f"flags: {len(flags)}  environment names: {len(environment)}  public names: {public}")
    print(f"runtime dependencies: {len(project['dependencies'])}")


def report_difference(files: dict[Path, str], base: str) -> None:
    """Lines per file against another commit."""
    listed = _git("ls-tree", "-r", "--name-only", base, "--", "src").split()
    before = {name: _git("show", f"{base}:{name}").count("\n") for name in listed if name.endswith(".py")}
    after = {str(path.relative_to(ROOT)): text.count("\n") for path, text in files.items()}
    for name in sorted(before.keys() | after.keys()):
        change = after.get(name, 0) - before.get(name, 0)
        if change:
            print(f"  {change:+6} {name}")
    print(f"difference to {base}: {sum(after.values()) - sum(before.values()):+} lines")


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
