"""Predicts the step of a configuration as `holdfast tiers probe`, `profile` and `plan` do, one after the other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast_lab.placement.access_profile import profile_accesses
from holdfast_lab.placement.network_time import NetworkTime, time_network
from holdfast_lab.placement.probe import probe
from holdfast_lab.placement.step_plan import step_inputs
from holdfast_lab.placement.step_time import StepInputs
from holdfast_lab.placement.tiers import Tiers
from larger.workload import FileOfBatches
from placement_check.configurations import Configuration


class Predictor:
    """disk, memory: directories that are probed. tiers: what was found, of memory (True) or the disk."""

    def __init__(self, disk: Path, memory: Path) -> None:
        self._disk, self._memory = disk, memory
        self.tiers: dict[bool, Tiers] = {}
        self._networks: dict[str, NetworkTime] = {}

    def inputs(self, configuration: Configuration, source: FileOfBatches) -> StepInputs:
        """All that a step of it follows from. The network is timed anew for every configuration, as `plan` does: what
        else a machine does changes."""
        config = configuration.run_config()
        profile = profile_accesses(source, config.train, num_batches=source.num_batches)
        tiers = self.tiers[configuration.in_memory]
        network = self._networks[configuration.name] = time_network(config, source)
        return step_inputs(config, source, tiers, profile, network=network)

    def record(self) -> dict[str, Any]:
        """All that predictions rest on but the profiles."""
        tiers = {"memory" if in_memory else "disk": asdict(tiers) for in_memory, tiers in self.tiers.items()}
        return {"tiers": tiers, "networks": {name: asdict(network) for name, network in self._networks.items()}}

    def probed(self, *, in_memory: bool) -> Tiers:
        found = probe(self._memory if in_memory else self._disk, on_step=lambda _done, _total=None: None)
        return Tiers(tiers=found.tiers, host=found.host)
