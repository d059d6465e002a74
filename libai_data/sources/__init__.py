"""Sources: records as they lie on disk, one module a format."""

from libai_data.sources.image_folder import ImageFolderSource
from libai_data.sources.indexed import IndexedSource
from libai_data.sources.indexed_writer import IndexedWriter, dtype_for, merge_indexed

__all__ = ["ImageFolderSource", "IndexedSource", "IndexedWriter", "dtype_for", "merge_indexed"]
