"""NVIDIA's published DLRM figures beside the simulator's."""
