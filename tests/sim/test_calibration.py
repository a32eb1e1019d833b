from __future__ import annotations

import numpy as np
import pytest

from holdfast_lab.sim.calibration import Fit, Free, Quantity, Region, Target, explore, fit, library_at, predict
from holdfast_lab.sim.library import Library, read_library

FREE = (
    Free(name="link", keys=("devices.cxl.bandwidth_bytes_per_s",), median=50e9, sigma=0.5, source="a test"),
    Free(name="efficiency", keys=("devices.rtx-3090.efficiency",), median=0.3, sigma=0.5, source="a test"),
    Free(name="batch size", keys=("models.*.batch_size",), median=256, sigma=0.5, source="a test"),
)
TRUTH = (0.8, -0.6, 0.5)
QUANTITIES = (
    Quantity(system="cxl-d", model="rm3"),
    Quantity(system="cxl-d", model="rm1"),
    Quantity(system="cxl-d", model="rm1", stages=("bottom_forward",)),
    Quantity(system="cxl-d", model="rm4", stages=("log_network",)),
    Quantity(system="cxl", model="rm1", stages=("update",)),
)


@pytest.fixture(scope="module")
def library() -> Library:
    return read_library()


@pytest.fixture(scope="module")
def targets(library: Library) -> list[Target]:
    values = predict(library_at(library, FREE, TRUTH), QUANTITIES)
    return [Target(quantity=each, value=float(v), sigma=0.001) for each, v in zip(QUANTITIES, values, strict=True)]


@pytest.fixture(scope="module")
def found(library: Library, targets: list[Target]) -> Fit:
    return fit(library, FREE, targets)


def test_a_fit_finds_the_parameters_that_the_measured_values_were_made_with(found: Fit) -> None:
    assert found.z == pytest.approx(TRUTH, abs=0.05)


def test_a_fit_begins_anywhere_and_ends_in_the_same_place(library: Library, targets: list[Target], found: Fit) -> None:
    assert fit(library, FREE, targets, start=(-1.0, 1.0, -1.0)).z == pytest.approx(found.z, abs=0.01)


def test_without_measured_values_parameters_stay_what_their_priors_say(library: Library) -> None:
    nothing = fit(library, FREE, [])
    assert nothing.z == pytest.approx((0.0, 0.0, 0.0))
    assert nothing.covariance == pytest.approx(np.eye(3))


def test_a_region_covers_the_truth_and_is_as_wide_as_what_was_read(library: Library, targets: list[Target]) -> None:
    coarse = [Target(quantity=each.quantity, value=each.value, sigma=0.05) for each in targets]
    asked = [Quantity(system="cxl-b", model="rm2")]
    truth = predict(library_at(library, FREE, TRUTH), asked)[0]
    region = explore(library, fit(library, FREE, coarse), coarse, asked, draws=60, seed=1)
    low, high = region.quantiles(region.predicted[:, 0], (0.05, 0.95))
    assert low < truth < high
    assert 0.01 < high / low - 1 < 0.2
    assert region.effective_draws > 20


def test_a_region_is_a_function_of_its_seed(library: Library, targets: list[Target], found: Fit) -> None:
    first, again, other = (
        explore(library, found, targets, QUANTITIES[:1], draws=5, seed=seed).predicted for seed in (7, 7, 8)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_parameter_that_nothing_depends_on_is_drawn_from_its_prior(
    library: Library, targets: list[Target], found: Fit
) -> None:
    power = Free(name="GPU", keys=("devices.rtx-3090.busy_watts",), median=200, sigma=0.2, source="a test")
    both = found.with_priors([power])
    assert both.values["GPU"] == 200
    region = explore(library, both, targets, QUANTITIES[:1], draws=200, seed=3)
    assert float(np.std(region.z[:, -1])) == pytest.approx(1.0, abs=0.2)


def test_weights_decide_quantiles_and_probabilities() -> None:
    values = np.array([3.0, 1.0, 2.0])
    region = Region(z=np.zeros((3, 1)), weights=np.array([0.1, 0.6, 0.3]), predicted=values[:, None])
    assert region.quantiles(values, (0.5, 0.8, 0.99)) == (1.0, 2.0, 3.0)
    assert region.probability(values > 1.5) == pytest.approx(0.4)
    assert region.effective_draws == pytest.approx(1 / 0.46)


def test_a_prior_without_width_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sigma = 0"):
        Free(name="x", keys=(), median=1, sigma=0, source="")
