"""Imports go in one direction and form no cycle."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ALLOWED = {
    "console": {"console"},
    "kernels": {"kernels"},
    "dataloading": {"dataloading", "console"},
    "compliance": {"compliance", "console"},
    "bert": {"bert", "kernels", "dataloading", "console", "compliance.log", "compliance.convergence.forecast"},
    "cluster": {"cluster", "bert", "kernels", "dataloading", "console", "compliance.log"},
}
"""For each package or subpackage, the packages and subpackages that its modules may import."""
PROGRAM_OF_KERNELS = "kernels.__main__"
"""Only module of kernels that may import console, for --version and Ctrl-C. Importing ops must not import it."""


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in ALLOWED for path in (REPOSITORY / package).rglob("*.py")}


@cache
def imported(module: str) -> frozenset[str]:
    """Return the full names of modules and attributes that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_imports(module: str) -> set[str]:
    return set(imported(module) & MODULES.keys())


def test_modules_import_only_what_their_packages_may() -> None:
    for module in MODULES:
        allowed = ALLOWED[module.partition(".")[0]] | ({"console"} if module == PROGRAM_OF_KERNELS else set())
        for name in own_imports(module):
            assert any(f"{name}.".startswith(f"{each}.") for each in allowed), f"{module} imports {name}"


def test_data_preparation_and_compliance_do_not_import_torch() -> None:
    outside = [module for module in MODULES if module.startswith(("dataloading", "compliance"))]
    users = {module for module in outside if "torch" in {name.partition(".")[0] for name in imported(module)}}
    assert users == {f"dataloading.batches.{name}" for name in ("loader", "loader_choice", "dali")}


def test_kernels_import_only_torch_triton_and_flash_attn() -> None:
    allowed = {"torch", "triton", "kernels", "flash_attn", *sys.stdlib_module_names}
    of_kernels = {module for module in MODULES if module.partition(".")[0] == "kernels"}
    for module in of_kernels - {PROGRAM_OF_KERNELS}:
        outside = {name.partition(".")[0] for name in imported(module)} - allowed
        assert not outside, f"{module} imports {outside}"


def test_there_are_no_import_cycles() -> None:
    # Do not count the import of a package's __init__ that only comes with the import of one of its modules.
    edges = {module: own_imports(module) - {module} for module in MODULES}
    for module, targets in edges.items():
        deeper = {target for target in targets if any(other.startswith(target + ".") for other in targets)}
        edges[module] = targets - deeper
    TopologicalSorter(edges).prepare()  # raises CycleError if there is a cycle


def test_subpackages_do_not_import_each_other_in_a_cycle() -> None:
    """Compare the direct subpackages and modules of each package. Imports only for type checking count too."""
    edges: dict[str, set[str]] = {}
    for module in MODULES:
        package, *place = module.split(".")
        if place:
            targets = {".".join(name.split(".")[:2]) for name in own_imports(module) if name.startswith(f"{package}.")}
            source = f"{package}.{place[0]}"
            edges[source] = edges.get(source, set()) | targets - {source}
    TopologicalSorter(edges).prepare()


def test_outside_compliance_only_the_log_writer_imports_the_rules() -> None:
    outside = [module for module in MODULES if not module.startswith("compliance")]
    readers = {module for module in outside if "compliance.log.rules" in own_imports(module)}
    assert readers == {"bert.log.mllog"}
