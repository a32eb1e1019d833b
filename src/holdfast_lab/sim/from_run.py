"""The simulator's model of a real run: its tables, network and batches, as its configuration describes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from holdfast_lab.sim.model import Model, TableGroup

if TYPE_CHECKING:
    from holdfast.run.sections import RunConfig
    from holdfast_lab.placement.access_profile import AccessProfile
    from holdfast_lab.placement.program import Demand


def model_of_run(
    config: RunConfig, profile: AccessProfile | None = None, *, zipf_exponent: float | None = None
) -> Model:
    """Opens the data, because they say how many ids a sample has. What is measured or assumed of them is in the model's
    `source`.

    zipf_exponent: of the ids, where they are not generated and there is no profile; None: all rows alike, which is the
    worst case of every cache, and what `holdfast plan` assumes. Of a profile, what falls on the hottest rows is taken.
    Raises ConfigError and DataError, as opening the data does.
    """
    from holdfast.data import SyntheticSource
    from holdfast.errors import ConfigError
    from holdfast.run.network import ModelConfig
    from holdfast.run.sources import open_source
    from holdfast_lab.placement.demand import demand_of

    network = config.model
    if not isinstance(network, ModelConfig):
        raise ConfigError("model.build: the simulator knows the network of a DLRM alone; give it a DLRM of that size")
    source = open_source(config.data)
    if not network.bottom:
        raise ConfigError("model.bottom: the simulator's DLRM has a bottom MLP, and these data have no dense columns")
    demand, basis = demand_of(config, source, profile)
    if isinstance(source, SyntheticSource):
        exponent = source.config.zipf_exponent
    else:
        exponent = 0.0 if zipf_exponent is None else zipf_exponent
    model = Model(
        batch_size=config.train.batch_size,
        tables=_groups(demand, config.embedding.dim, config.train.batch_size, is_counted=profile is not None),
        bottom=network.bottom,
        top=network.top,
        num_dense=source.num_dense,
        zipf_exponent=exponent,
        interaction=network.interaction,
        weight_bytes=demand.tables[0].weight_bytes / config.embedding.dim,
        state_bytes=demand.tables[0].state_bytes,
        parameter_bytes=1.0,
        source=f"a run's configuration; {basis}",
    )
    return _with_parameter_bytes(model, demand)


def _groups(demand: Demand, dim: int, batch_size: int, *, is_counted: bool) -> tuple[TableGroup, ...]:
    """Neighbours that are alike, together. is_counted: their ladders are of real ids."""
    shapes = [
        (
            table.rows,
            table.accesses_per_batch / batch_size,
            tuple((float(rung.rows), rung.access_share) for rung in table.ladder) if is_counted else (),
        )
        for table in demand.tables
    ]
    return tuple(
        TableGroup(count=len(list(alike)), rows=rows, dim=dim, lookups=lookups, hottest=hottest)
        for (rows, lookups, hottest), alike in groupby(shapes)
    )


def _with_parameter_bytes(model: Model, demand: Demand) -> Model:
    """The dense part's bytes, optimizer's state and all, spread over its parameters and over the steps from one dense
    state to the next."""
    parameters = model.bottom_parameters + model.top_parameters
    return replace(model, parameter_bytes=demand.dense_bytes_per_batch / parameters)
