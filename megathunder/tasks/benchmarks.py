"""What is never trained on: the repositories of SWE-bench.

An instance of one of them is held out whatever a split says. This proves no more than it says: copies under other
names, forks, and what a pretrained model has read are not looked for. Called by tasks.swe and tools/prepare_data.py.
"""

from __future__ import annotations

REPOSITORIES = frozenset(
    {"astropy__astropy", "django__django", "matplotlib__matplotlib", "mwaskom__seaborn", "pallets__flask",
     "psf__requests", "pydata__xarray", "pylint-dev__pylint", "pytest-dev__pytest", "scikit-learn__scikit-learn",
     "sphinx-doc__sphinx", "sympy__sympy"}
)  # fmt: skip


def is_benchmark(repository: str) -> bool:
    """`repository` as in tasks.swe: owner__name, or owner__name.commit."""
    return repository in REPOSITORIES or repository.rpartition(".")[0] in REPOSITORIES
