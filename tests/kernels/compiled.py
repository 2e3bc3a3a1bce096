"""Cache file with the costs of all Triton kernel configurations, because compiling all of them takes minutes.

    python -m tests.kernels.compiled        # compiles configurations that the file lacks, and updates the file

The file has a section for each version of Triton and identifies a configuration by a digest of everything that affects
its compilation. Tests compile configurations that are not in the file, and one of each module again to validate the file.
"""

import ast
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels import ahead_of_time
from kernels.ahead_of_time import Cost
from kernels.configuration import Configuration

FILE = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True)
class Item:
    """A kernel configuration, compiled for one compute capability."""

    module: str
    configuration: Configuration
    capability: int

    @property
    def name(self) -> str:
        kernel = self.configuration.kernel.__name__
        return f"{self.module}: {kernel}, {self.configuration.name}, sm_{self.capability}"

    def digest(self) -> str:
        """Return a digest of the kernel, its callees, its configuration, and the functions that compile and measure it."""
        chosen = self.configuration
        settings = chosen.signature, chosen.constexprs, chosen.num_warps, chosen.num_stages, chosen.max_registers
        measuring = (
            _code(inspect.getsource(each))
            for each in (ahead_of_time.cost, ahead_of_time.compiled, ahead_of_time.figures)
        )
        parts = self.name, chosen.kernel.cache_key, settings, ahead_of_time.INSTRUCTIONS, *measuring
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _code(source: str) -> str:
    """Return a function's source without comments and docstring, which do not affect compilation."""
    tree = ast.parse(source)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return ast.unparse(tree)


def _without_comments() -> None:
    """Remove comments and line numbers from the kernels' sources."""
    import triton  # imported only if something is compiled

    for module in [module for name, module in sys.modules.items() if name.startswith("kernels.triton")]:
        for function in vars(module).values():
            if isinstance(function, triton.JITFunction):
                function._unsafe_update_src(_code(function.src))
                function.starting_line_number = 0


@dataclass(frozen=True)
class Findings:
    """Costs of all configurations, and problems of the file or the kernels."""

    costs: list[Cost]
    lacking: list[str]
    """Names of configurations that are not in the file."""
    wrong: list[str]
    """Differences between the file's costs and the compiler's."""
    specialized: list[str]
    """Parameters for which Triton specializes a kernel if the value is 1 or a multiple of 16."""


def find() -> Findings:
    """Read known costs from the file, compile the other configurations, and validate a sample of the known ones."""
    kept = {digest: Cost(**figures) for digest, figures in _read().get(_version(), {}).items()}
    items = {item.digest(): item for item in _items()}
    lacking = [digest for digest in items if digest not in kept]
    again = [digest for digest in _sample(items) if digest in kept]
    compiled = _compile([items[digest] for digest in (*lacking, *again)])
    found = dict(zip((*lacking, *again), compiled, strict=True))
    return Findings(
        [found.get(digest) or kept[digest] for digest in items],
        [items[digest].name for digest in lacking if kept],
        [f"{kept[digest]}, compiled {found[digest]}" for digest in again if found[digest] != kept[digest]],
        sorted({f"{item.module}: {name}" for item in items.values() for name in _specialized(item.configuration)}),
    )


def _specialized(configuration: Configuration) -> list[str]:
    numbers = [each for each in configuration.kernel.params if configuration.signature[each.name] in ("i32", "i64")]
    return [each.name for each in numbers if not each.do_not_specialize]


def _read() -> dict[str, dict[str, dict]]:
    """Return the file's costs by Triton version and digest."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def _version() -> str:
    import triton  # imported only if something is compiled

    return triton.__version__


def _items() -> list[Item]:
    configurations = ahead_of_time.all_configurations()
    _without_comments()
    return [
        Item(module, configuration, capability)
        for module, its_own in configurations.items()
        for configuration in its_own
        for capability in configuration.capabilities
    ]


def _sample(items: dict[str, Item]) -> list[str]:
    """Choose one configuration from each module, with alternating architectures."""
    by_module: dict[str, list[str]] = {}
    for digest, item in items.items():
        by_module.setdefault(item.module, []).append(digest)
    return [its_own[place % len(its_own)] for place, its_own in enumerate(by_module.values())]


def _compile(items: Iterable[Item]) -> list[Cost]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda item: ahead_of_time.cost(item.module, item.configuration, item.capability), items))


def main() -> None:
    """Update the installed Triton version's section of the file."""
    versions, items = _read(), {item.digest(): item for item in _items()}
    kept = versions.get(_version(), {})
    lacking = {digest: item for digest, item in items.items() if digest not in kept}
    costs = kept | {digest: asdict(cost) for digest, cost in zip(lacking, _compile(lacking.values()), strict=True)}
    versions[_version()] = {digest: costs[digest] for digest in items}
    # One line per configuration keeps diffs readable.
    rows = {
        version: ",\n".join(f'"{digest}": {json.dumps(figures)}' for digest, figures in its_own.items())
        for version, its_own in sorted(versions.items())
    }
    sections = ",\n".join(f'"{version}": {{\n{its_own}\n}}' for version, its_own in rows.items())
    FILE.write_text(f"{{{sections}}}\n", encoding="utf-8")
    print(f"{FILE}: {len(items)} configurations, of which {len(lacking)} were compiled with Triton {_version()}")


if __name__ == "__main__":
    main()
