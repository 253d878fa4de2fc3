"""What a wheel of this tree holds, and how it behaves where it is installed.

The tree is copied first, so a build leaves nothing behind here. A build, and an installation of
its result, use the running environment's setuptools and pip and download nothing.
"""

import ast
import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Source folder -> the folder that it is installed as.
FOLDERS = {"swa_compile": "swa_compile", "ops": "swa_compile/ops", "passes": "swa_compile/passes"}
# Where the running environment's packages lie: torch, setuptools and the others.
SHARED = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]

COMPILES_X_PLUS_1 = """
import sys, torch
assert "swa_compile" not in sys.modules
x = torch.arange(4.0)
assert torch.equal(torch.compile(lambda x: x + 1, backend={backend!r})(x), x + 1)
print(sys.modules["swa_compile"].__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs `command` in `cwd`, without what the environment says of imports and of pip."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout.strip()


def copy_tree(to: Path) -> Path:
    """Copies what a build reads, without caches and earlier builds."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, to)
    return to


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the running one's packages, after its own.

    The running environment's site-packages are plain entries of the path there: their .pth files
    are not read, so an editable install of swa-compile in the running environment is not seen.
    """

    path: Path
    bin: Path
    site_packages: Path

    @classmethod
    def make(cls, path: Path) -> "Environment":
        run(sys.executable, "-m", "venv", "--without-pip", path, cwd=path.parent)
        bin = path / ("Scripts" if os.name == "nt" else "bin")
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        made = cls(path, bin, Path(run(bin / "python", "-c", code, cwd=path)))
        (made.site_packages / "shared.pth").write_text("\n".join(SHARED) + "\n")
        return made

    def install(self, *what: str | Path) -> None:
        python = self.bin / "python"
        offline = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        pip = (sys.executable, "-m", "pip", "--python", python, "install", *offline)
        run(*pip, *what, cwd=self.path)

    def python(self, code: str, *, cwd: Path) -> str:
        return run(self.bin / "python", "-c", code, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    to = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", to, tree, cwd=tree)
    (built,) = to.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return message_from_string(read_info(wheel, "METADATA"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment.make(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(wheel)
    return environment


def read_info(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


# What the wheel holds


def test_wheel_holds_every_module_where_it_is_imported_from(names: set[str]) -> None:
    expected = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    missing = expected - names
    assert not missing, f"tool.setuptools.packages in pyproject.toml lacks a folder: {missing}"
    assert {name for name in names if name.endswith(".py")} == expected


def test_wheel_installs_nothing_at_the_top_level_but_swa_compile(names: set[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert top == {"swa_compile", next(n for n in top if n.endswith(".dist-info"))}


def test_wheel_holds_the_typing_marker_and_the_data_files(names: set[str]) -> None:
    folders = ("swa_compile/data", "swa_compile/viewer/assets")
    data = [{f"{at}/{file.name}" for file in (ROOT / at).iterdir()} for at in folders]
    assert all(data)
    assert {"swa_compile/py.typed"}.union(*data) <= names


def test_wheel_holds_the_license(wheel: Path, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert read_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_wheel_declares_the_backends_and_the_script(wheel: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read_info(wheel, "entry_points.txt"))
    assert {name: dict(parser[name]) for name in parser.sections()} == {
        "torch_dynamo_backends": {
            "swa": "swa_compile.backends:swa",
            "swa_eager": "swa_compile.backends:swa_eager",
        },
        "pytest11": {"swa_compile": "swa_compile.pytest_plugin"},
        "console_scripts": {"swa-compile": "swa_compile.cli:main"},
    }


def test_wheel_requires_triton_on_linux_only_and_nothing_for_tests(metadata: Message) -> None:
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [r.split(";")[0].strip() for r in required] == [
        "torch>=2.11",
        "triton",
        "depyf",
        "numpy",
        "rich",
    ]
    (triton,) = (r for r in required if r.startswith("triton"))
    assert 'platform_system == "Linux"' in triton
    assert metadata["Requires-Python"] == ">=3.10"


def test_a_source_distribution_builds_the_same_wheel(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    to = tmp_path_factory.mktemp("dist")
    # Without --wheel and --sdist, the wheel is built from the source distribution.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", to, tree, cwd=tree)
    (built,) = to.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        assert set(archive.namelist()) == names


# How it behaves where it is installed


def test_installed_package_is_the_wheels(installed: Environment, tmp_path: Path) -> None:
    code = "import swa_compile, swa_compile.ops, swa_compile.passes as p; print(p.__file__)"
    expected = installed.site_packages / "swa_compile/passes/__init__.py"
    assert Path(installed.python(code, cwd=tmp_path)) == expected


@pytest.mark.parametrize("name", ["ops", "passes"])
def test_installed_package_adds_no_module_of_that_name(
    installed: Environment, tmp_path: Path, name: str
) -> None:
    code = f"import importlib.util as u; print(u.find_spec({name!r}))"
    assert installed.python(code, cwd=tmp_path) == "None"


@pytest.mark.parametrize("backend", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_torch_compile_finds_the_backend_without_an_import(
    installed: Environment, tmp_path: Path, backend: str
) -> None:
    code = COMPILES_X_PLUS_1.format(backend=backend)
    printed = installed.python(code, cwd=tmp_path).splitlines()[-1]
    assert Path(printed) == installed.site_packages / "swa_compile/__init__.py"


def test_installed_script_and_module_print_the_same_help(
    installed: Environment, tmp_path: Path
) -> None:
    script = run(installed.bin / "swa-compile", "--help", cwd=tmp_path)
    module = run(installed.bin / "python", "-m", "swa_compile", "--help", cwd=tmp_path)
    assert script == module
    assert "demo" in script


# Editable installs


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, Path]:
    if any((Path(path) / "swa_compile").exists() for path in SHARED):
        pytest.skip("swa_compile is installed in the running environment, and not editable")
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    environment = Environment.make(tmp_path_factory.mktemp("editable") / "venv")
    environment.install("--editable", tree)
    return environment, tree


def test_editable_install_maps_ops_and_passes(
    editable: tuple[Environment, Path], tmp_path: Path
) -> None:
    environment, tree = editable
    code = "from swa_compile import ops, passes; print(ops.__file__); print(passes.__file__)"
    expected = [tree / folder / "__init__.py" for folder in ("ops", "passes")]
    # From elsewhere, and from the tree, where the bare swa_compile/ comes first on the path.
    for cwd in (tmp_path, tree):
        printed = environment.python(code, cwd=cwd)
        assert [Path(path) for path in printed.splitlines()] == expected


def test_editable_install_finds_subpackages_that_are_added_later(
    editable: tuple[Environment, Path], tmp_path: Path
) -> None:
    environment, tree = editable
    for folder in FOLDERS:
        (tree / folder / "added_later").mkdir()
        (tree / folder / "added_later/__init__.py").touch()
    added = [f"{target}/added_later".replace("/", ".") for target in FOLDERS.values()]
    environment.python(f"import {', '.join(added)}", cwd=tmp_path)


def test_editable_install_offers_the_backends(
    editable: tuple[Environment, Path], tmp_path: Path
) -> None:
    environment, tree = editable
    code = COMPILES_X_PLUS_1.format(backend="swa_eager")
    printed = environment.python(code, cwd=tmp_path).splitlines()[-1]
    assert Path(printed) == tree / "swa_compile/__init__.py"


# The sources


def test_no_source_imports_ops_or_passes_as_top_level_modules() -> None:
    """From the repository's root such an import works; in an installed package it fails."""
    bad = []
    for folder in (*FOLDERS, "tests", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [node.module or ""]
                else:
                    continue
                if any(module.split(".")[0] in ("ops", "passes") for module in modules):
                    bad.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not bad
