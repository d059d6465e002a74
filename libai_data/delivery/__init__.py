"""Local tensors in, global tensors out."""

from libai_data.delivery.contract import check_forward_fields
from libai_data.delivery.to_global import to_global

__all__ = ["check_forward_fields", "to_global"]
