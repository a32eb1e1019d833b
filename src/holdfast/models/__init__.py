"""Networks in plain PyTorch: nothing here knows of pools, sharding or the simulator."""

from holdfast.models.dlrm import DLRM

__all__ = ["DLRM"]
