"""Rules of the library: layers of imports, packaging, light imports and forbidden calls."""

import ast
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.structure.wheel import ROOMS, ROOT

# Each layer may import those before it, and its own folder.
LAYERS = (
    ("errors", "registry", "storage", "types"),
    ("trees",),
    ("needs",),
    ("sampling", "models"),
    ("rules",),
    ("budget", "reports"),
    ("verification",),
    ("drafters",),
    ("engine",),
    ("bridge_rows",),
    ("bridge",),
    ("retrievers", "visual"),
    ("training",),
    ("pipelines",),
    ("adapters",),
)
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks", "training", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.is_relative_to(ROOT / ROOMS["training"])
]
ENTRY_FILES = ("__init__.py", "__main__.py")  # they may import from any layer
HEAVY = (
    *("transformers", "sentence_transformers", "datasets", "faiss", "diffusers"),
    *("lxml", "pypdfium2", "docx", "pptx", "openpyxl"),
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def import_parts(path: Path, root: Path = ROOT) -> tuple[str, ...]:
    """Return the parts of the module's or folder's import name."""
    relative = path.relative_to(root)
    for room, place in ROOMS.items():
        if relative.is_relative_to(place):
            relative = Path(room, relative.relative_to(place))
    parts = relative.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return parts if parts[0] == "ragspec" else ("ragspec", *parts)


def modules_of(root: Path) -> dict[str, Path]:
    """Return every module of the library by import name; the links to rooms are not followed."""
    files = [
        path
        for place in [*(root / "ragspec").glob("*"), *(root / place for place in ROOMS.values())]
        if not (place.name in ROOMS and place.parent.name == "ragspec")
        for path in (place.rglob("*.py") if place.is_dir() else [place])
        if path.suffix == ".py"
    ]
    return {".".join(import_parts(path, root)): path for path in sorted(files)}


MODULES = modules_of(ROOT)
LIBRARY = list(MODULES.values())
ALL = [*LIBRARY, *SCRIPTS, ROOT / "dev.py"]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every dotted name that a module imports, at any depth and under any guard."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_in(dotted: str) -> set[str]:
    return {room for room in ROOMS if f"{dotted}.".startswith((f"ragspec.{room}.", f"{room}."))}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def part_of(dotted: str) -> str:
    """Return the part of the library that a module belongs to, as LAYERS calls it."""
    return dotted.split(".")[1] if "." in dotted else dotted


def import_graph(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, without entry files."""
    record: dict[str, set[str]] = {}
    for module, path in modules.items():
        if path.name in ENTRY_FILES:
            continue
        record[module] = set()
        for dotted in imported(parse(path)):
            while dotted.startswith("ragspec.") and dotted not in modules:
                dotted = dotted.rpartition(".")[0]
            if dotted in modules and dotted != module:
                record[module].add(dotted)
    return record


def upward_imports(result: dict[str, set[str]]) -> list[str]:
    """Return the imports that do not go to a lower layer."""
    return [
        f"{module} imports {other}"
        for module, others in result.items()
        for other in sorted(others)
        if other != "ragspec"
        and part_of(other) != part_of(module)
        and LEVEL[part_of(other)] >= max(LEVEL[part_of(module)], 1)
    ]


def cycle(result: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle of imports, the first one twice; empty for none."""
    try:
        TopologicalSorter(result).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folders_of(result: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the same imports between folders, without those between a folder and its contents.

    A module directly below `ragspec` counts as a folder.
    """

    def nested(one: str, other: str) -> bool:
        return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")

    def folder(module: str) -> str:
        above = module.rpartition(".")[0]
        return module if above in ("", "ragspec") else above

    between: dict[str, set[str]] = {}
    for module, others in result.items():
        ours = between.setdefault(folder(module), set())
        theirs = {folder(other) for other in others}
        ours |= {each for each in theirs if not nested(each, folder(module))}
    return between


def test_imports_go_to_lower_layers_only() -> None:
    assert upward_imports(import_graph(MODULES)) == []


def test_imports_have_no_cycle() -> None:
    """Lazy imports and those for type checkers count, between files and between folders."""
    assert cycle(import_graph(MODULES)) == []
    assert cycle(folders_of(import_graph(MODULES))) == []


def test_every_part_has_a_layer() -> None:
    parts = {part_of(module) for module in MODULES} - {"ragspec", "__main__"}
    assert parts == set(LEVEL)


@pytest.mark.parametrize(
    ("module", "code", "caught"),
    [
        ("ragspec.trees.operations", "from ragspec.engine.engine import Engine", 1),
        ("ragspec.trees.operations", "def f():\n    import ragspec.sampling.noise", 1),
        ("ragspec.retrievers.methods.rasd", "from ragspec.visual import VQTokenizer", 1),
        ("ragspec.retrievers.methods.rasd", "from ragspec.pipelines import DocQA", 1),
        ("ragspec.visual.checks", "from ragspec.retrievers import Hit", 1),
        ("ragspec.trees.operations", "from ragspec.errors import InputError", 0),
        ("ragspec.pipelines.methods", "from ragspec.visual import VQTokenizer", 0),
    ],
)
def test_the_check_of_layers_can_fail(tmp_path: Path, module: str, code: str, caught: int) -> None:
    (tmp_path / "bad.py").write_text(code, encoding="utf-8")
    assert len(upward_imports(import_graph(MODULES | {module: tmp_path / "bad.py"}))) == caught


def test_the_check_of_cycles_can_fail(tmp_path: Path) -> None:
    code = "if TYPE_CHECKING:\n    from ragspec.engine.engine import Engine"
    (tmp_path / "bad.py").write_text(code, encoding="utf-8")
    bad = import_graph(MODULES | {"ragspec.engine.sequence": tmp_path / "bad.py"})
    assert "ragspec.engine.sequence" in cycle(bad)
    of_folders = {"ragspec.a.x": {"ragspec.b.y"}, "ragspec.b.z": {"ragspec.a.w"}}
    assert cycle(of_folders) == []
    assert set(cycle(folders_of(of_folders))) == {"ragspec.a", "ragspec.b"}


def test_the_library_imports_no_scripts_and_names_rooms_in_full() -> None:
    outside = (*ROOMS, "tests", "examples", "benchmarks")
    for path in LIBRARY:
        names = [dotted.split(".")[0] for dotted in imported(parse(path))]
        assert not set(names) & set(outside), name(path)


def test_only_the_registry_names_a_room() -> None:
    core = [p for m, p in MODULES.items() if part_of(m) not in ROOMS and p.name not in ENTRY_FILES]
    for path in core:
        for node in ast.walk(parse(path)) if path.name != "registry.py" else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                is_name = text.replace(".", "").replace(":", "").replace("_", "").isalnum()
                named = is_name and rooms_in(text.split(":")[0])
                assert not named, f"{name(path)} names {text!r}"


def test_the_median_function_has_ten_lines_at_most() -> None:
    nodes = (node for path in LIBRARY for node in ast.walk(parse(path)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert statistics.median((f.end_lineno or f.lineno) - f.lineno + 1 for f in functions) <= 10


def test_every_folder_is_packaged_under_its_import_name() -> None:
    setuptools = pyproject()["tool"]["setuptools"]
    folders = {".".join(import_parts(path.parent / "__init__.py")) for path in LIBRARY}
    assert sorted(setuptools["packages"]) == sorted(folders)
    assert setuptools["package-dir"] == {f"ragspec.{room}": place for room, place in ROOMS.items()}
    for path in LIBRARY:
        assert (path.parent / "__init__.py").is_file(), f"{name(path.parent)} is no package"


@pytest.mark.parametrize("room", ROOMS)
def test_the_link_to_a_room_is_relative(room: str) -> None:
    link = ROOT / "ragspec" / room
    if link.is_file() and not link.is_symlink():
        pytest.skip("checked out without symbolic links")
    assert link.is_symlink()
    assert link.readlink() == Path("..") / ROOMS[room]


def test_the_version_is_that_of_pyproject_and_changelog() -> None:
    import ragspec

    assert ragspec.__version__ == pyproject()["project"]["version"]
    assert ragspec.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_bundled_files_stay_small() -> None:
    sizes = {p: p.stat().st_size for p in (ROOT / "ragspec" / "starter").rglob("*") if p.is_file()}
    assert sum(sizes.values()) <= 40e6
    assert not [name(path) for path, size in sizes.items() if size > 15e6]
    foreign = {p.suffix for p in sizes} & {".pt", ".pth", ".bin", ".pkl", ".pickle"}
    assert not foreign, "weights come as safetensors"


def loaded_by(modules: list[str], selection: tuple[str, ...]) -> dict[str, str]:
    """Return the modules for which a fresh interpreter first loads each of the `selection`."""
    code = f"""
import importlib, json, sys
blame = {{}}
for module in {modules!r}:
    importlib.import_module(module)
    for heavy in set({selection!r}) & set(sys.modules):
        blame.setdefault(heavy, module)
print(json.dumps(blame))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_import_ragspec_loads_nothing_heavy() -> None:
    rooms = tuple(f"ragspec.{room}" for room in ROOMS)
    assert loaded_by(["ragspec"], ("torch", "numpy", "typer", "pydantic", *HEAVY, *rooms)) == {}


def test_the_command_line_and_a_search_start_without_models() -> None:
    assert loaded_by(["ragspec.pipelines.cli.app"], ("torch", *HEAVY)) == {}
    search = ["ragspec.retrievers.search.passage_index", "ragspec.pipelines.answering.docqa"]
    assert loaded_by(search, (*HEAVY, "charset_normalizer")) == {}


def test_no_module_loads_a_heavy_library_when_imported() -> None:
    """Only modules that subclass classes of transformers may load it, and their users."""
    hosts = ("langchain", "llamaindex", "haystack", "lm_eval")  # need not be installed
    left_out = ("ragspec.__main__", *[f"ragspec.adapters.{name}" for name in hosts])
    modules = [module for module in MODULES if module not in left_out]
    modules.sort(key=lambda name: ".retrievers." not in name)  # these come without transformers
    loaded = loaded_by(modules, HEAVY)
    assert loaded.keys() <= {HEAVY[0]} and ".retrievers." not in loaded.get(HEAVY[0], "")


PACKAGES = [module for module, path in MODULES.items() if path.name == "__init__.py"]
# Users import these names by these paths.
PROMISED = {
    "ragspec": {"Engine", "Sampling", "Generation", "Report", "RagspecError", "load_model"},
    "ragspec.bridge": {"Speculation", "generate", "speculative"},
    "ragspec.pipelines": {"Answer", "Citation", "DocQA", "Prompt", "build_prompt"},
    "ragspec.retrievers": {"AutoDrafter", "ContextDrafter", "CorpusIndex", "PassageIndex", "Rasd"},
    "ragspec.visual": {"ImagePipeline", "JacobiDrafter", "load_llamagen", "VQTokenizer"},
}


@pytest.mark.parametrize(
    "package", [p for p in PACKAGES if MODULES[p].with_suffix(".pyi").exists()]
)
def test_every_public_name_is_exported(package: str) -> None:
    """A stub lists the public names; each of them can be imported."""
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module)) | {"__version__"}
    for public in module.__all__:
        assert getattr(module, public) is not None
    with pytest.raises(AttributeError, match="Engin"):
        module.Engin  # noqa: B018


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_stay(module: str) -> None:
    for public in PROMISED[module]:
        assert getattr(import_module(module), public) is not None


def violations(tree: ast.AST, file: str) -> Iterator[str]:
    """Yield the forbidden calls, imports and literals of a module of the library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.split(":")[0] in ("cuda", "mps") and file != "device.py":
                yield f"device literal {node.value!r}"
        elif isinstance(node, ast.Call):
            yield from call_violations(ast.unparse(node.func), node)
    for dotted in imported(tree):
        if dotted.split(".")[0] in ("pickle", "dill", "cloudpickle", "marshal", "shelve"):
            yield f"import {dotted}"


def call_violations(function: str, node: ast.Call) -> Iterator[str]:
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    if function in ("eval", "exec", "os.system", "torch.manual_seed", "random.seed"):
        yield f"{function}()"
    if function.startswith(("np.random.", "numpy.random.")) and "default_rng" not in function:
        yield f"{function}(): a global generator"
    if function == "torch.load" and ast.unparse(keywords.get("weights_only", node)) != "True":
        yield "torch.load without weights_only=True"
    safe = {k.arg for k in node.keywords} & {"trust_remote_code", None}  # None is **LOCAL
    if re.fullmatch(r"(?:\w+\.)*Auto\w+\.from_pretrained", function) and not safe:
        yield "from_pretrained of an Auto class, which may ask whether to run a folder's code"
    for switch in ("trust_remote_code", "allow_pickle", "shell"):
        if switch in keywords and ast.unparse(keywords[switch]) != "False":
            yield f"{switch}={ast.unparse(keywords[switch])}"


BASES = ("ragspec.drafters", "ragspec.rules", "ragspec.needs", "ragspec.retrievers.methods")
FOREIGN = {  # of transformers models
    "ragspec.drafters.heads.head": 1,
    "ragspec.drafters.heads.fresh": 1,
    "ragspec.drafters.build": 1,
}


def attr_calls(tree: ast.AST) -> int:
    """Return the number of calls of `getattr` and `hasattr`."""
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(call in ("getattr", "hasattr") for call in calls)


def test_attributes_of_drafters_and_rules_are_declared() -> None:
    """Optional members have a default in the base class, and needs are declared in `Needs`."""
    counts = {
        module: attr_calls(parse(path))
        for module, path in MODULES.items()
        if module.startswith((*BASES, "ragspec.visual.rules"))
    }
    assert len(counts) > 30
    assert {module: count for module, count in counts.items() if count} == FOREIGN


def test_the_library_has_no_forbidden_call_or_import() -> None:
    used = {name(path): list(violations(parse(path), path.name)) for path in LIBRARY}
    assert {path: each for path, each in used.items() if each} == {}


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "eval('1')"),
        *("load(trust_remote_code=True)", "load(trust_remote_code=flag)"),
        "AutoConfig.from_pretrained(folder, local_files_only=True)",
        *("x.to('cuda')", "x.to('cuda:0')"),
        *("torch.load(p)", "np.load(p, allow_pickle=True)"),
        *("def f():\n    global x\n    x = 1", "np.random.rand(3)", "torch.manual_seed(0)"),
    ],
)
def test_the_check_of_forbidden_calls_can_fail(code: str) -> None:
    assert list(violations(ast.parse(code), "x.py"))


def test_no_file_names_a_local_folder() -> None:
    here = [str(folder) for folder in (ROOT, Path.home()) if len(folder.parts) > 1]
    for path in [*ALL, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "ragspec").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not [folder for folder in here if f"{folder}/" in text], name(path)
