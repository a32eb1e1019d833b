"""Networks in plain PyTorch: nothing here knows of pools, sharding or the simulator."""

from holdfast.models.building import ModelInputs, build_dlrm
from holdfast.models.dlrm import DLRM

__all__ = ["DLRM", "ModelInputs", "build_dlrm"]
