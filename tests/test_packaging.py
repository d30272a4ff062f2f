"""The wheel: one import name, everything the product needs, nothing it does not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
NOT_SOURCE = ("build", "dist", "*.egg-info", "__pycache__", ".*")
# Heavy, or of another world: nothing of the runtime may need them.
BANNED = {"torch", "transformers", "scipy", "librosa", "pydantic", "fastapi", "safetensors"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built in a copy, so that the working tree stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    copy, out = folder / "source", folder / "out"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE, "golden"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> Message:
    (name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


def package_folders(project: dict[str, Any]) -> dict[str, Path]:
    """Folder of each listed package, as setuptools finds it through package-dir."""
    mapped: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    folders = {}
    for package in project["tool"]["setuptools"]["packages"]:
        parent, rest = package, []
        while parent not in mapped:
            parent, _, last = parent.rpartition(".")
            rest.insert(0, last)
        folders[package] = ROOT.joinpath(mapped[parent], *rest)
    return folders


def modules(project: dict[str, Any]) -> dict[str, Path]:
    """Every Python file of the listed packages, by its path in the wheel."""
    return {
        f"{package.replace('.', '/')}/{path.name}": path
        for package, folder in package_folders(project).items()
        for path in folder.glob("*.py")
    }


def test_the_wheel_has_one_top_level(names: set[str], project: dict[str, Any]) -> None:
    version = project["project"]["version"]
    tops = {name.split("/")[0] for name in names}
    assert tops == {"warble_mlx", f"warble_mlx-{version}.dist-info"}


def test_the_oldest_python_is_the_same_everywhere(project: dict[str, Any]) -> None:
    about = project["project"]
    named = [c.rpartition(" ")[2] for c in about["classifiers"] if " :: Python :: 3." in c]
    oldest = min(named, key=lambda version: [int(part) for part in version.split(".")])
    assert about["requires-python"] == f">={oldest}"
    assert project["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert project["tool"]["mypy"]["python_version"] == oldest


def test_the_listed_packages_are_the_folders(project: dict[str, Any]) -> None:
    """A new sub-package has to be listed, or the wheel would lack it without a word."""
    folders = package_folders(project)
    roots = {ROOT / folder for folder in project["tool"]["setuptools"]["package-dir"].values()}
    present = {init.parent for root in roots for init in root.rglob("__init__.py")}
    assert set(folders.values()) == present
    assert len(folders) == len(set(folders.values()))


def test_every_module_is_in_the_wheel(names: set[str], project: dict[str, Any]) -> None:
    assert {name for name in names if name.endswith(".py")} == set(modules(project))
    assert "warble_mlx/py.typed" in names


def test_the_bundled_model_and_its_notices_are_in_the_wheel(wheel: Path, names: set[str]) -> None:
    folder = ROOT / "warble_mlx" / "bundled"
    wanted = {f"warble_mlx/bundled/{path.name}": path for path in folder.iterdir()}
    assert {name for name in names if "/bundled/" in name} == set(wanted)
    needed = {"config.json", "model.safetensors", "codec_decoder.safetensors", "tokenizer.json",
              "voices.json", "NOTICE", "LICENSE.wordnet"}  # fmt: skip
    assert needed <= {path.name for path in wanted.values()}
    with zipfile.ZipFile(wheel) as archive:
        for name, path in wanted.items():
            assert archive.read(name) == path.read_bytes(), name


def test_licence_and_notice_go_along(wheel: Path, names: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in ("LICENSE", "NOTICE"):
            (inside,) = (n for n in names if n.endswith(f".dist-info/licenses/{name}"))
            text = archive.read(inside).decode()
            assert text == (ROOT / name).read_text()
            assert "Apache License" in text
    notice = (ROOT / "NOTICE").read_text()
    assert "Kokoro-82M" in notice
    assert "Princeton" in notice


def test_one_command_is_installed(wheel: Path, names: set[str]) -> None:
    (name,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(name).decode().split() == [
            "[console_scripts]", "warble", "=", "warble_mlx.cli:main"
        ]  # fmt: skip


def requirement_name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_the_core_needs_nothing_heavy(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    core = {requirement_name(r) for r in requirements if "extra ==" not in r}
    assert "mlx" in core
    assert not core & BANNED


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            (name,) = node.args
            if isinstance(name, ast.Constant):
                found.add(str(name.value).split(".")[0])
    return found


def test_imports_and_dependencies_agree(project: dict[str, Any]) -> None:
    """Nothing is imported that is not declared, nothing declared that is not imported."""
    used = {name for path in modules(project).values() for name in imported(path)}
    used -= {*sys.stdlib_module_names, "warble_mlx"}
    extras = project["project"]["optional-dependencies"]
    optional = {requirement_name(r) for name, rs in extras.items() if name != "dev" for r in rs}
    core = {requirement_name(r) for r in project["project"]["dependencies"]}
    declared = {name.replace("-", "_") for name in core | optional}
    assert used == declared


def test_python_in_a_checkout_finds_the_packages_beside() -> None:
    """As after `git clone` and `pip install .`: the current folder comes first."""
    code = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n"
        "import warble_mlx.convert, warble_mlx.quant.policy, warble_mlx.ios_export\n"
        "print(warble_mlx.convert.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "convert" / "__init__.py"
