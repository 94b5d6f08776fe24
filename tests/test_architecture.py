"""The shape of the repository: imports point one way, files stay short, nothing of a machine leaks in."""

import ast
import io
import os
import re
import tokenize
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("layer_select", "drafts", "train", "cli")
MAX_LINES = 400

# a folder may import itself and what stands in its row; the runtime sees none of the others
FOLDER_MAY_IMPORT = {
    "specdec": {"specdec"},
    "layer_select": {"specdec", "layer_select"},
    "drafts": {"specdec", "drafts"},
    "train": {"specdec", "layer_select", "drafts", "train"},
    "cli": {"specdec", "layer_select", "drafts", "train", "cli"},
}
# the runtime from the ground up: a module imports its own tier or a lower one, and never in a circle
RUNTIME_TIERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset(
        {"config", "disk_space", "engine_limits", "exactness"}
        | {"provenance", "random_streams", "request_options"}
    ),
    frozenset(
        {
            "attention",
            "block_files",
            "block_storage",
            "blocks",
            "cold_tiers",
            "disk_tier",
            "idle_blocks",
            "paged_kv",
            "prefix_cache",
            "prefix_index",
            "prefix_stage",
        }
        | {"live_costs", "node_budget"}
        | {"constraints", "convert", "detokenize", "grammar", "hf", "hf_markers", "loading", "logprobs"}
        | {"penalties", "processors", "sampling", "sampling_params", "sequence", "speculation", "step_logits"}
        | {
            "divergence",
            "exact_law",
            "random_target",
            "simulated",
            "stats",
            "step_times",
            "tree",
            "verification",
        }
    ),
    frozenset({"drafter", "fetch", "kernels", "pieces", "requests"}),
    frozenset({"admission", "hub", "models", "prefix_setup", "rule_choice"}),
    frozenset({"scheduler"}),
    frozenset({"cost_model", "runner"}),
    frozenset({"acceptance", "memory"}),
    frozenset({"device", "engine_setup", "proposals"}),
    frozenset({"engine"}),
    frozenset({"audit", "server"}),
)
# pairs of one tier that only annotations need, imported under TYPE_CHECKING: no circle at run time
TYPE_ONLY = {"sequence": {"detokenize", "logprobs", "processors", "simulated", "speculation", "verification"}}


@cache
def python_files() -> list[Path]:
    """Every .py of the project, each once (the four folders where they are, not through the links)."""
    folders = [ROOT / "specdec", *(ROOT / name for name in LINKED), ROOT / "tests"]
    files = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(ROOT).parts
            if not (inside[0] == "specdec" and inside[1] in LINKED):
                files.append(path)
    return files


def source_files() -> list[Path]:
    return [path for path in python_files() if path.relative_to(ROOT).parts[0] != "tests"]


def imported_modules(path: Path) -> set[str]:
    """Full names of what a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: write imports in full, specdec.x"
            assert node.module is not None, "an absolute from-import has a module"
            # `from specdec import hub` names a module too
            found |= (
                {node.module}
                if node.module != "specdec"
                else {f"specdec.{alias.name}" for alias in node.names}
            )
    return found


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "specdec":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LINKED else "specdec"


@pytest.mark.parametrize("name", LINKED)
def test_the_folders_are_reached_through_relative_links(name: str) -> None:
    """Catches a checkout or a copy that turned a link into a file or a second copy of the code."""
    link = ROOT / "specdec" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_between_folders_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    if path == ROOT / "specdec" / "__init__.py":
        return  # its names are looked up lazily, from all over the runtime
    for module in imported_modules(path):
        assert module.split(".")[0] not in LINKED, f"import specdec.{module}, not the bare folder"
        folder = folder_of(module)
        assert folder is None or folder in FOLDER_MAY_IMPORT[own], f"{own} must not import {module}"


def runtime_modules() -> dict[str, set[str]]:
    """First-level runtime modules and the first-level runtime modules each imports."""
    graph: dict[str, set[str]] = {}
    for path in source_files():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "specdec" or parts == ("specdec", "__init__.py"):
            continue
        name = parts[1].removesuffix(".py")
        names = {module.split(".")[1] for module in imported_modules(path) if module.startswith("specdec.")}
        graph.setdefault(name, set()).update(names - {name})
    return graph


def test_every_runtime_module_has_a_tier() -> None:
    placed = frozenset().union(*RUNTIME_TIERS)
    assert set(runtime_modules()) <= placed, "give the new module a tier in RUNTIME_TIERS"


def test_imports_inside_the_runtime_point_one_way() -> None:
    tier = {name: index for index, names in enumerate(RUNTIME_TIERS) for name in names}
    graph = runtime_modules()
    upward = [
        f"{name} -> {other}" for name, others in graph.items() for other in others if tier[other] > tier[name]
    ]
    assert not upward
    try:
        list(
            TopologicalSorter(
                {name: others - TYPE_ONLY.get(name, set()) for name, others in graph.items()}
            ).static_order()
        )
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {error.args[1]}")


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short_and_say_what_they_own(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"split it by concept: more than {MAX_LINES} lines"
    assert ast.get_docstring(ast.parse(text)), "a module docstring says what the file owns"
    assert not re.search(r"utils|legacy|_new|_v\d", path.stem), "name the file after its concept"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_are_ascii_and_nothing_is_left_to_do(path: Path) -> None:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            assert token.string.isascii(), f"line {token.start[0]}: {token.string}"
            assert not re.search(r"\b(TO" + r"DO|FIX" + r"ME|XXX)\b", token.string), f"line {token.start[0]}"


def test_no_file_carries_a_machine_path() -> None:
    """Catches a folder of somebody's machine in code, documents or run records."""
    forbidden = re.compile(
        r"(?<![\w.])/(?:" + "|".join(("work", "root", "farm", r"tmp/\w+", r"home/\w+")) + r")/"
    )
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".html", ".cfg"}
    folders = [ROOT / name for name in ("specdec", *LINKED, "tests", "results")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    files += [
        path for path in ROOT.iterdir() if path.is_file() and (path.suffix in suffixes or not path.suffix)
    ]
    bad = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        if not path.name.startswith("corpus_") and path.is_file()
        for match in forbidden.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not bad
