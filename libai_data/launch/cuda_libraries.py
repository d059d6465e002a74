"""Makes `import oneflow` find the CUDA 11 libraries that it needs, also on machines without a GPU.

OneFlow 0.9 is linked against cuBLAS 11 and cuDNN 8. Its wheel finds them in the `nvidia-*` packages in the same
site-packages, and the dynamic loader finds them on the search path of a CUDA machine. Elsewhere (a user site,
`pip install --target`, system packages) the import fails. `install_import_hook` prevents this: just before OneFlow's
extension module is loaded, the hook loads each library from the folder that has it, the machine's own first.

A hook is used because the libraries have hundreds of megabytes. Processes that only read data, and never import
OneFlow, should not map these libraries.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import ModuleType

from libai_data.launch.same_interpreter import import_paths

# Sorted: each library comes after the libraries that it depends on.
SONAMES = (
    "libcublasLt.so.11",
    "libcublas.so.11",
    "libcudnn_ops_infer.so.8",
    "libcudnn_ops_train.so.8",
    "libcudnn_cnn_infer.so.8",
    "libcudnn_cnn_train.so.8",
)
PACKAGE = "oneflow"
_Around = Callable[[], AbstractContextManager[None]]
EXTENSION = "oneflow._oneflow_internal"
REMEDY = 'pip install nvidia-cublas-cu11 "nvidia-cudnn-cu11<9"'


def install_import_hook(joining: _Around, loading: _Around) -> None:
    """Make a later `import oneflow` find its CUDA libraries.

    Args:
        joining: Returns a context manager around this import. If OneFlow is already imported, it is entered at once.
        loading: Returns a context manager around the load of OneFlow's extension module, within `joining`.
    """
    if EXTENSION in sys.modules:
        with joining():
            pass
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(joining, loading))


def package_library_folders() -> list[Path]:
    """Return the folders of the `nvidia-*` packages that contain a library OneFlow needs, in search order."""
    folders: list[Path] = []
    for entry in import_paths():
        with suppress(OSError):  # Imports leave out an entry that cannot be read, too.
            for folder in sorted((Path(entry or ".") / "nvidia").glob("*/lib")):
                if folder not in folders and any((folder / soname).is_file() for soname in SONAMES):
                    folders.append(folder)
    return folders


def library_path_for_ranks() -> str | None:
    """Return the LD_LIBRARY_PATH that a process needs to import OneFlow without `libai_data`, None if it needs none.

    The folders of the packages are last, so that the machine's own libraries are found first.
    """
    spec = importlib.util.find_spec("oneflow")
    if spec is None or spec.origin is None or all(_is_neighbour(Path(spec.origin).parent, each) for each in SONAMES):
        return None
    if all(_loads(soname) for soname in SONAMES):
        return None
    own = os.environ.get("LD_LIBRARY_PATH", "")
    folders = [str(folder) for folder in package_library_folders()]
    return os.pathsep.join([own, *folders] if own else folders) or None


def load(oneflow_folder: Path) -> list[str]:
    """Load the CUDA libraries that the dynamic loader would not find for OneFlow's extension module.

    Args:
        oneflow_folder: The folder of the `oneflow` package.

    Returns:
        The names of the libraries that were not found.
    """
    folders = package_library_folders()
    missing = []
    for soname in SONAMES:
        if _loads(soname) or _is_neighbour(oneflow_folder, soname):
            continue
        if not any(_loads(str(folder / soname)) for folder in folders):
            missing.append(soname)
    return missing


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _is_neighbour(oneflow_folder: Path, soname: str) -> bool:
    """Whether the wheel's RPATH ($ORIGIN/../nvidia/{cublas,cudnn}/lib) leads to the library."""
    nvidia = oneflow_folder.parent / "nvidia"
    return any((nvidia / package / "lib" / soname).is_file() for package in ("cublas", "cudnn"))


class _Finder(importlib.abc.MetaPathFinder):
    """Loads OneFlow with `_JoiningLoader` and its extension module with `_Loader`; other modules are not affected."""

    def __init__(self, joining: _Around, loading: _Around):
        self._joining, self._loading = joining, loading

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (PACKAGE, EXTENSION):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _JoiningLoader(fullname, spec.loader.path, self._joining)
        if spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path, self._loading)
        return spec


class _JoiningLoader(importlib.machinery.SourceFileLoader):
    """Imports OneFlow within the context manager `joining` of the hook."""

    def __init__(self, fullname: str, path: str, joining: _Around):
        super().__init__(fullname, path)
        self._joining = joining

    def exec_module(self, module: ModuleType) -> None:
        with self._joining():
            super().exec_module(module)


class _Loader(importlib.machinery.ExtensionFileLoader):
    """Loads the CUDA libraries before the extension module; if one is missing, the error says what to install."""

    def __init__(self, fullname: str, path: str, loading: _Around):
        super().__init__(fullname, path)
        self._loading = loading

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        missing = load(Path(self.path).parent)
        try:
            with self._loading():
                return super().create_module(spec)
        except ImportError as error:
            if str(error).startswith(KeyboardInterrupt.__name__):  # of an extension, Python shows only its text
                raise KeyboardInterrupt from None
            if not missing:
                raise
            raise ImportError(
                f"{error}. OneFlow needs {', '.join(missing)}, which neither the dynamic loader (LD_LIBRARY_PATH, "
                f"ldconfig) nor any nvidia/*/lib folder on sys.path has. Install them: {REMEDY}",
                name=error.name,
                path=error.path,
            ) from error
