"""Packages of each host's image that the tests install, and the host's variables and folders."""

from __future__ import annotations

COMMON = [
    "accelerate",
    "alembic",
    "click",
    "cloudpickle",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "jupyter_client",
    "jupyter_core",
    "jupyter_server",
    "matplotlib",
    "nbclient",
    "nbconvert",
    "nbformat",
    "numpy",
    "nvidia-ml-py",
    "packaging",
    "pandas",
    "pip",
    "protobuf",
    "psutil",
    "pyarrow",
    "pydantic",
    "PyYAML",
    "pyzmq",
    "rich",
    "scikit-learn",
    "scipy",
    "setuptools<82",
    "SQLAlchemy",
    "tenacity",
    "torch",
    "tornado",
    "traitlets",
    "typer",
]

MORE: dict[str, list[str]] = {"kaggle": ["optuna", "papermill", "torchmetrics"], "colab": []}

VARIABLES: dict[str, dict[str, str]] = {
    "kaggle": {
        "KAGGLE_KERNEL_RUN_TYPE": "Batch",
        "KAGGLE_CONTAINER_NAME": "kaggle_x",
        "KAGGLE_URL_BASE": "https://www.kaggle.com",
        "PYTHONPATH": "::/opt/facets/facets_overview/python/",
        "MKL_THREADING_LAYER": "GNU",
    },
    "colab": {
        "COLAB_RELEASE_TAG": "release-colab_20260819",
        "COLAB_JUPYTER_IP": "172.28.0.12",
        "PYTHONPATH": "/env/python",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONWARNINGS": "ignore:::pip._internal.cli.base_command",
    },
}

WORKING = {"kaggle": "/kaggle/working", "colab": "/content"}
