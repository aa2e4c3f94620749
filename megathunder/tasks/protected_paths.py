"""Which files of a repository decide how its tests run: these are never taken from an agent.

    test files                 anything under a folder tests/ or test/, test_*.py, *_test.py
    settings of a test run     conftest.py, pytest.ini, setup.cfg, tox.ini, pyproject.toml, setup.py
    what an import may find    pytest.py, pluggy.py ..., sitecustomize.py, usercustomize.py, *.pth, *.pyc, *.so
    bookkeeping                .git, __pycache__, caches

The grader writes the pristine versions instead. Called by sandbox.verify and tasks.swe.
"""

from __future__ import annotations

from pathlib import PurePosixPath

FOLDERS = frozenset({"tests", "test"})
SETTINGS = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "setup.cfg", "tox.ini",
     "pyproject.toml", "setup.py", "sitecustomize.py", "usercustomize.py"}
)  # fmt: skip
RUNNERS = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"})
BOOKKEEPING = frozenset({".git", "__pycache__", ".pytest_cache", ".hypothesis"})
SUFFIXES = frozenset({".pth", ".pyc", ".pyo", ".so", ".pyd"})


def is_test_file(path: str) -> bool:
    """Whether a repository keeps a test there."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return bool(FOLDERS & set(parts[:-1])) or (
        name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    )


def decides_tests(path: str) -> bool:
    """Whether a file there could change how tests run without being a test itself."""
    pure = PurePosixPath(path)
    first = pure.parts[0].removesuffix(".py")
    return pure.name in SETTINGS or pure.suffix in SUFFIXES or first in RUNNERS or bool(BOOKKEEPING & set(pure.parts))


def is_protected(path: str) -> bool:
    """Whether the pristine version is used, or none, whatever an agent left there."""
    return is_test_file(path) or decides_tests(path)
