"""Sources: records as they lie on disk, one module a format."""

from libai_data.sources.image_folder import ImageFolderSource

__all__ = ["ImageFolderSource"]
