"""Schedules say what waits for what, and what cannot be meant is refused before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.sim.library import read_system
from holdfast_lab.sim.system import Stage, System


def stage(*after: str, skip: bool = False, on: tuple[str, ...] = ("gpu",)) -> Stage:
    return Stage(does="bottom_forward", on=on, after=after, skip=skip)


def system(**stages: Stage) -> System:
    return System(title="test", devices={"gpu": "rtx-3090", "link": "pcie"}, stages=stages)


PIPELINE = """
title = "Pipeline"
source = "made up"
[devices]
gpu = "rtx-3090"
[stages.first]
does = "bottom_forward"
on = ["gpu"]
calls = 3
[stages.second]
does = "bottom_backward"
on = ["gpu"]
after = ["first"]
"""


@pytest.fixture
def read(tmp_path: Path):
    def read(name: str, **files: str) -> System:
        for stem, text in files.items():
            (tmp_path / f"{stem}.toml").write_text(text)
        return read_system(tmp_path / f"{name}.toml")

    return read


def test_a_role_without_a_device_is_refused_with_those_that_have_one():
    with pytest.raises(ValueError, match=r"^stages\.a\.on: there is no device 'gpus'; there are gpu, link$"):
        system(a=stage(on=("gpus",)))


def test_a_role_that_a_stage_runs_beside_needs_a_device_as_well():
    with pytest.raises(ValueError, match=r"^stages\.a.*there is no device 'host'; there are gpu, link$"):
        system(a=Stage(does="bottom_forward", on=("gpu",), beside={"host": 0.5}))


@pytest.mark.parametrize("wait", ["c", "previous.c", "next.b"])
def test_waiting_for_a_stage_that_is_not_there_is_refused_with_those_that_are(wait):
    with pytest.raises(ValueError, match=rf"^stages\.b\.after: there is no stage '{re.escape(wait)}'; a, b$"):
        system(a=stage(), b=stage(wait))


def test_waiting_for_an_earlier_batch_of_a_stage_that_is_not_there_is_refused_too():
    with pytest.raises(ValueError, match=r"^stages\.a\.after: there is no stage 'c'; a$"):
        system(a=Stage(does="bottom_forward", on=("gpu",), after_earlier={"c": 2}))


def test_a_stage_without_a_device_is_refused():
    with pytest.raises(ValueError, match=r"^stages\.a\.on = \[\]; it names one device at least"):
        system(a=stage(on=()))


def test_a_stage_cannot_hold_one_device_twice():
    with pytest.raises(ValueError, match=r"^stages\.a\.on = \['gpu', 'gpu'\]; .* none twice$"):
        system(a=stage(on=("gpu", "gpu")))


def test_a_system_does_something():
    for stages in ({}, {"a": stage(skip=True)}):
        with pytest.raises(ValueError, match=r"^stages: there is none, or all are skipped$"):
            system(**stages)


@pytest.mark.parametrize(
    ("stages", "circle"),
    [
        ({"a": stage("a")}, ["a", "a"]),
        ({"a": stage("b"), "b": stage("a")}, ["a", "b", "a"]),
        ({"x": stage(), "a": stage("x", "c"), "b": stage("a"), "c": stage("b")}, ["a", "c", "b", "a"]),
        ({"a": stage("b"), "b": stage("a", skip=True)}, ["a", "b", "a"]),
    ],
)
def test_stages_that_wait_for_each_other_within_a_batch_are_refused_and_named_in_their_order(stages, circle):
    with pytest.raises(ValueError, match=r"^stages wait for each other within a batch: ") as caught:
        system(**stages)
    named = str(caught.value).partition(": ")[2].split(" after ")
    assert named[0] == named[-1]
    start = circle.index(named[0])
    assert named == circle[start:-1] + circle[: start + 1]


def test_a_circle_in_a_file_is_a_config_error_that_names_the_file(read):
    text = PIPELINE.replace("calls = 3", 'after = ["second"]')
    with pytest.raises(ConfigError, match=r"pipeline\.toml: stages wait for each other within a batch: .*first"):
        read("pipeline", pipeline=text)


def test_stages_may_wait_for_each_other_across_batches():
    found = system(a=stage("previous.b", "previous.a"), b=stage("a"))
    assert found.waits("a") == ("previous.b", "previous.a")
    assert found.waits("b") == ("a",)


def test_who_waits_for_a_skipped_stage_waits_for_what_it_would_wait_for():
    found = system(a=stage(), b=stage(), s=stage("a", "b", skip=True), c=stage("s"))
    assert found.waits("c") == ("a", "b")
    assert list(found.active) == ["a", "b", "c"]


def test_waits_pass_through_a_chain_of_skipped_stages_each_named_once():
    found = system(a=stage(), s=stage("a", skip=True), t=stage("s", "a", skip=True), c=stage("t", "s", "a"))
    assert found.waits("c") == ("a",)


def test_a_skipped_stage_without_waits_is_waited_for_no_more():
    assert system(s=stage(skip=True), c=stage("s", "previous.s")).waits("c") == ()


def test_what_the_skipped_stage_of_the_batch_before_waits_for_is_of_the_batch_before():
    found = system(a=stage(), s=stage("a", skip=True), c=stage("previous.s"))
    assert found.waits("c") == ("previous.a",)


def test_what_a_skipped_stage_waits_for_in_the_batch_before_stays_there():
    found = system(a=stage(), s=stage("previous.a", skip=True), c=stage("s"))
    assert found.waits("c") == ("previous.a",)


def test_what_is_two_batches_back_counts_as_one_batch_back():
    found = system(a=stage(), s=stage("previous.a", skip=True), c=stage("previous.s"))
    assert found.waits("c") == ("previous.a",)


def test_a_skipped_stage_that_waits_for_its_own_batch_before_passes_the_rest_through():
    found = system(a=stage(), log=stage("a", "previous.log", skip=True), c=stage("log"))
    assert found.waits("c") == ("a", "previous.a")


def test_a_base_gives_everything_that_the_file_does_not_say(read):
    text = 'base = "pipeline"\ntitle = "Other"\n[stages.second]\nafter = ["previous.first"]\n'
    found = read("other", pipeline=PIPELINE, other=text)
    assert found.title == "Other"
    assert found.source == "made up"
    assert found.base == "pipeline"
    assert found.devices == {"gpu": "rtx-3090"}
    assert found.stages["first"] == Stage(does="bottom_forward", on=("gpu",), calls=3)
    assert found.stages["second"] == Stage(does="bottom_backward", on=("gpu",), after=("previous.first",))


def test_of_three_files_that_build_on_each_other_the_last_word_counts(read):
    middle = 'base = "pipeline"\n[stages.first]\ncalls = 5\npart = 0.5\n'
    found = read("top", pipeline=PIPELINE, middle=middle, top='base = "middle"\n[stages.first]\ncalls = 7\n')
    assert found.title == "Pipeline"
    assert (found.stages["first"].calls, found.stages["first"].part) == (7, 0.5)


def test_a_base_may_be_one_of_the_package(read):
    found = read("mine", mine='base = "pcie"\n[devices]\nlink = "cxl"\n')
    assert found.devices["link"] == "cxl"
    assert "update" in found.stages


def test_a_base_that_is_not_there_is_refused_with_the_nearest(read):
    with pytest.raises(ConfigError, match=r"mine\.toml: base: there is no system 'pci' to build on; did you mean 'p"):
        read("mine", mine='base = "pci"\n')


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a": 'base = "a"\n'}, "a on a"),
        ({"a": 'base = "b"\n', "b": 'base = "a"\n'}, "a on b on a"),
        ({"a": 'base = "b"\n', "b": 'base = "c"\n', "c": 'base = "b"\n'}, "a on b on c on b"),
    ],
)
def test_systems_that_build_on_each_other_are_refused_and_named(read, files, circle):
    with pytest.raises(ConfigError, match=rf"base: systems build on each other: {circle}$"):
        read("a", **files)


def test_a_wrong_value_names_file_and_key(read):
    with pytest.raises(ConfigError, match=r"pipeline\.toml: stages\.first\.does: found \"bottom_forwards\""):
        read("pipeline", pipeline=PIPELINE.replace('"bottom_forward"', '"bottom_forwards"'))
