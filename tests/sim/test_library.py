"""Declarations are files that can be copied, hidden and changed, and what is wrong with them is said by its name."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ConfigError, DoesNotFit
from holdfast_lab.sim.caches import missed_rows_per_batch
from holdfast_lab.sim.device import Device, Memory
from holdfast_lab.sim.facts import read_facts
from holdfast_lab.sim.library import PACKAGED, Library, read_device, read_library, read_model, read_system
from holdfast_lab.sim.model import workload_of
from holdfast_lab.sim.system import System

LIBRARY = read_library()


def changed(key: str, value: object) -> Library:
    return LIBRARY.changed({key: value})


def test_every_packaged_file_is_toml_and_is_read_under_its_name():
    for kind, read in (("devices", LIBRARY.devices), ("models", LIBRARY.models), ("systems", LIBRARY.systems)):
        paths = sorted((PACKAGED / kind).glob("*.toml"))
        assert len(paths) >= 4
        assert sorted(read) == sorted(path.stem for path in paths)
    for path in PACKAGED.rglob("*.toml"):
        assert tomllib.loads(path.read_text(encoding="utf-8")), path


def test_every_packaged_device_and_model_says_where_its_figures_are_from():
    for name, declared in {**LIBRARY.devices, **LIBRARY.models}.items():
        assert len(declared.source) >= 5, name


def holds_too_little(system: System, model: str) -> bool:
    """Of systems of GPUs."""
    tables = LIBRARY.device(system.devices.get("tables", system.devices["gpu"]))
    modules = tables.modules if isinstance(tables, Memory) else system.gpus
    return workload_of(LIBRARY.model(model)).table_bytes > modules * tables.capacity_bytes


CACHES_MODELS = ("rm1", "kaggle")  # of which the ids are drawn, at a second a model and system


def kinds(stage, system) -> set[str]:
    return {LIBRARY.device(system.devices[role]).kind for role in stage.on}


@pytest.mark.parametrize(
    ("system", "model"),
    [
        (system, model)
        for system, declared in sorted(LIBRARY.systems.items())
        for model in (sorted(LIBRARY.models) if declared.cache is None else CACHES_MODELS)
        if not (system in ("gpus", "hbm", "hbm-sharded", "hbm-spread") and holds_too_little(declared, model))
    ],
)
def test_every_packaged_system_runs_the_packaged_models_that_fit_it(system, model):
    found = LIBRARY.run(system, model)
    declared = LIBRARY.system(system)
    alone = {
        name for name, stage in declared.active.items() if declared.gpus == 1 and "fabric" in kinds(stage, declared)
    }
    assert all(found.stage_s[name] == 0 for name in alone)
    positive = [found.batch_s, found.joules_per_batch]
    positive += [seconds for name, seconds in found.stage_s.items() if name not in alone]
    assert all(math.isfinite(number) and number > 0 for number in positive)
    assert all(math.isfinite(joules) and joules >= 0 for joules in found.joules_by_role.values())
    assert set(found.stage_s) == set(LIBRARY.system(system).active)
    assert set(found.joules_by_role) == set(LIBRARY.system(system).devices)
    assert max(found.busy_s.values()) <= found.batch_s * (1 + 1e-9) <= sum(found.stage_s.values()) * (1 + 2e-9)


@pytest.mark.parametrize("rule", read_facts().energy_rules, ids=lambda rule: rule.title)
def test_by_every_rule_the_modules_that_take_power_are_at_least_those_that_work(rule):
    library = rule.library(LIBRARY)
    memories = [each for each in library.devices.values() if isinstance(each, Memory)]
    for model in library.models.values():
        workload = workload_of(model)
        assert all(0 < each.num_working(workload) <= each.num_modules(workload) for each in memories)


def test_tables_that_their_memory_does_not_hold_are_refused_by_name():
    small = changed("devices.pmem-module.capacity_bytes", 1e6)
    words = r"^system 'CXL': the tables take 532 GB, and tables \(pmem-module\) have .* MB: give it more modules"
    with pytest.raises(DoesNotFit, match=words):
        small.run("cxl", "mlperf")


def test_a_scratchpad_that_the_gpu_does_not_hold_is_refused_by_name():
    words = r"^system 'ScratchPipe': 0\.1 of all rows take 53\.2 GB, and cache \(rtx-3090-memory\) have 24 GB: make"
    with pytest.raises(DoesNotFit, match=words):
        LIBRARY.run("scratchpipe", "mlperf")
    roomy = changed("devices.rtx-3090-memory.capacity_bytes", 54e9)
    assert roomy.run("scratchpipe", "mlperf").batch_s > 0


def test_tiers_hold_the_tables_together():
    both = LIBRARY.changed({"devices.a100-hbm.capacity_bytes": 1e9, "devices.ddr4-server.capacity_bytes": 1e9})
    assert both.run("mtrains", "mlperf").batch_s > 0
    little = {"p4800x.capacity_bytes": 1e9, "pmem-host.capacity_bytes": 1e9, "pmem-host.modules_by": "fixed"}
    flash = both.changed({f"devices.{key}": value for key, value in little.items()})
    words = r"the tables take 532 GB, and tables \(ddr4-server\), hbm .*, byte .*, block "
    with pytest.raises(DoesNotFit, match=words):
        flash.run("mtrains", "mlperf")


def test_an_expander_with_a_scratchpad_updates_each_row_once_and_fetches_what_is_missed():
    system = LIBRARY.system("expander")
    assert {system.stages[name].rows for name in ("collect", "write_back")} == {"missed"}
    assert system.stages["update"].rows == "unique"
    slow = changed("devices.cxl-expander.read_bandwidth_bytes_per_s", 1e9)
    assert slow.run("expander", "rm1").stage_s["collect"] > LIBRARY.run("expander", "rm1").stage_s["collect"]


def test_near_memory_over_flash_is_bound_by_its_drives_random_reads():
    run, drive = LIBRARY.run("nvme", "rm1"), LIBRARY.device("p4800x")
    missed = missed_rows_per_batch(LIBRARY.system("nvme").cache, LIBRARY.model("rm1"))
    assert run.stage_s["fetch"] == pytest.approx(missed * drive.read_latency_s / drive.outstanding_requests)
    assert run.batch_s == pytest.approx(run.busy_s["tables"], rel=0.01)
    logged_s = workload_of(LIBRARY.model("rm1")).unique_rows * 128 / drive.write_bandwidth_bytes_per_s
    assert run.stage_s["log_rows_before"] == pytest.approx(logged_s)


def test_where_all_rows_are_in_the_gpu_there_is_no_near_memory_that_is_faster():
    times = {system: LIBRARY.run(system, "rm1").batch_s for system in ("hbm", "hbm-spread", "cxl")}
    assert max(times["hbm"], times["hbm-spread"]) < times["cxl"]
    with pytest.raises(DoesNotFit, match="All rows in one GPU"):
        LIBRARY.run("hbm", "rm2")
    assert LIBRARY.run("hbm-spread", "rm2").batch_s < LIBRARY.run("cxl", "rm2").batch_s


def test_gpus_that_share_a_batch_sum_their_gradients_over_their_links():
    spans = LIBRARY.run("hbm-sharded", "rm4").stage_s
    link, workload = LIBRARY.device("pcie-peers-x4"), workload_of(LIBRARY.model("rm4"))
    moved_s = 6 * workload.network_bytes / link.bandwidth_bytes_per_s
    assert spans["all_reduce"] == pytest.approx(moved_s + link.latency_s + link.start_s)


def twice_as_slow(device: Device) -> Device:
    values = {}
    for field in fields(device):
        if field.name == "rates":
            values["rates"] = {
                name: replace(rate, flops_per_s=rate.flops_per_s / 2) for name, rate in device.rates.items()
            }
        elif field.name.endswith("_per_s") and getattr(device, field.name) is not None:
            values[field.name] = getattr(device, field.name) / 2
        elif field.name.endswith("_s") and getattr(device, field.name) is not None:
            values[field.name] = getattr(device, field.name) * 2
    return replace(device, **values)


@pytest.mark.parametrize("system", sorted(name for name, each in LIBRARY.systems.items() if each.cache is None))
def test_where_every_device_is_twice_as_slow_a_batch_takes_exactly_twice_as_long_and_twice_the_energy(system):
    slow = replace(LIBRARY, devices={name: twice_as_slow(each) for name, each in LIBRARY.devices.items()})
    here, there = LIBRARY.run(system, "rm1"), slow.run(system, "rm1")
    assert there.batch_s == pytest.approx(2 * here.batch_s, rel=1e-12)
    assert there.joules_per_batch == pytest.approx(2 * here.joules_per_batch, rel=1e-12)


def test_a_slower_start_of_every_call_moves_a_batch_in_turn_by_the_calls_times_that():
    stages = LIBRARY.system("pcie").stages
    calls = sum(stages[name].calls for name in ("interaction_top", "bottom_backward"))
    before = changed("devices.rtx-3090.start_s", 1e-3)
    after = changed("devices.rtx-3090.start_s", 3e-3)
    longer_s = after.run("pcie", "rm4").batch_s - before.run("pcie", "rm4").batch_s
    assert longer_s == pytest.approx(2e-3 * (calls + stages["bottom_forward"].calls), rel=1e-9)


def test_a_device_that_a_system_does_not_use_moves_nothing():
    elsewhere = LIBRARY.changed({"devices.pmem-host.read_latency_s": 1.0, "devices.pmem-host.idle_watts": 1e6})
    here, there = LIBRARY.run("cxl", "rm2"), elsewhere.run("cxl", "rm2")
    assert (here.batch_s, here.joules_per_batch) == (there.batch_s, there.joules_per_batch)


def test_a_changed_library_differs_in_what_was_named_and_in_nothing_else():
    key, value = "devices.pcie.bandwidth_bytes_per_s", 30e9
    found = changed(key, value)
    assert found.device("pcie") == replace(LIBRARY.device("pcie"), bandwidth_bytes_per_s=value)
    assert {name: each for name, each in found.devices.items() if name != "pcie"} == {
        name: each for name, each in LIBRARY.devices.items() if name != "pcie"
    }
    assert (found.models, found.systems) == (LIBRARY.models, LIBRARY.systems)
    assert LIBRARY.device("pcie") == read_device(PACKAGED / "devices" / "pcie.toml")


def test_a_models_values_change_and_of_its_tables_rows_lookups_and_size_too():
    assert changed("models.rm1.batch_size", 512).model("rm1") == replace(LIBRARY.model("rm1"), batch_size=512.0)
    for field, value in (("rows", 5e5), ("lookups", 3.0), ("dim", 64)):
        tables = changed(f"models.rm1.{field}", value).model("rm1").tables
        assert tables == tuple(replace(group, **{field: value}) for group in LIBRARY.model("rm1").tables)


def test_a_star_means_every_model():
    found = changed("models.*.zipf_exponent", 0.5)
    assert {model.zipf_exponent for model in found.models.values()} == {0.5}
    assert changed("models.*.rows", 77.0).model("rm3").tables[0].rows == 77


def test_a_system_changes_by_stage_by_role_and_as_a_whole():
    found = LIBRARY.changed(
        {
            "systems.cxl.stages.log_network.part": 0.5,
            "systems.cxl.stages.lookup.after": ["previous.update"],
            "systems.cxl.devices.link": "pcie",
            "systems.cxl.title": "Mine",
        }
    ).system("cxl")
    was = LIBRARY.system("cxl")
    assert found.stages["log_network"] == replace(was.stages["log_network"], part=0.5)
    assert found.stages["lookup"] == replace(was.stages["lookup"], after=("previous.update",))
    assert found.devices == {**was.devices, "link": "pcie"}
    assert found.title == "Mine"
    assert found.stages["update"] == was.stages["update"]


def test_a_star_means_every_system_that_has_the_stage_or_the_role():
    found = changed("systems.*.stages.interaction_top.calls", 4)
    assert {each.stages["interaction_top"].calls for each in found.systems.values()} == {4.0}
    with_logic = {name for name, each in LIBRARY.systems.items() if "logic" in each.devices}
    assert set() < with_logic < set(LIBRARY.systems)
    found = changed("systems.*.devices.logic", "host-cpu")
    assert {name for name, each in found.systems.items() if each.devices.get("logic") == "host-cpu"} == with_logic


def test_numbers_of_numpy_are_numbers():
    assert changed("devices.pcie.start_s", np.float64(0.5)).device("pcie").start_s == 0.5
    assert changed("models.rm1.dim", np.int64(8)).model("rm1").tables[0].dim == 8


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("device.pcie.start_s", 1.0, "it begins with none of devices, models, systems"),
        ("devices.pci.start_s", 1.0, "there is no device 'pci'; did you mean 'pcie'?"),
        ("devices.pcie.start", 1.0, "there is no 'start'; did you mean 'start_s'?"),
        ("devices.pcie", 1.0, "there is no ''; there are bandwidth_bytes_per_s"),
        ("devices.pcie.start_s", "fast", 'found "fast" (a string), expected a number'),
        ("devices.pcie.start_s", -1.0, "start_s = -1.0; it must be 0 or more"),
        ("devices.pcie.parallelism", 1.5, "found 1.5 (a number), expected an integer"),
        ("models.rm9.batch_size", 8, "there is no model 'rm9'; did you mean 'rm"),
        ("models.rm1.batchsize", 8, "there is no 'batchsize'; did you mean 'batch_size'?"),
        ("models.rm1.batch_size", 0, "batch_size = 0.0; it must be more than 0"),
        ("models.*.rows", 0, "rows = 0.0; it must be more than 0"),
        ("models.rm1.interaction", "dots", 'found "dots" (a string), expected "dot" or "concat"; did you mean dot?'),
        ("systems.cxll.title", "x", "there is no system 'cxll'; did you mean 'cxl'?"),
        ("systems.cxl.stages.lokup.part", 1, "there is no stage 'lokup'; did you mean 'lookup'?"),
        ("systems.cxl.stages.lookup.prt", 1, "there is no 'prt'; did you mean 'part'?"),
        ("systems.cxl.stages.lookup.rows", "uniq", 'found "uniq" (a string), expected "accesses" or'),
        ("systems.cxl.stages.lookup.skip", "false", 'found "false" (a string), expected true or false'),
        ("systems.cxl.stages.lookup.after", ["lokup"], "stages.lookup.after: there is no stage 'lokup'"),
        ("systems.cxl.stages.lookup.after", ["move_pooled"], "stages wait for each other within a batch: "),
        ("systems.cxl.stages.lookup.on", ["gpus"], "stages.lookup.on: there is no device 'gpus'"),
        ("systems.cxl.devices.lnk", "pcie", "there is no role 'lnk'; did you mean 'link'?"),
        ("systems.cxl.devices.link", 3, "found 3 (an integer), expected a string"),
        ("systems.*.stages.lokup.part", 1, "no system has 'lokup' among its stages; did you mean 'lookup'?"),
        ("systems.*.devices.lnk", "cxl", "no system has 'lnk' among its devices; did you mean 'link'?"),
    ],
)
def test_a_change_that_cannot_be_made_names_its_key_and_the_nearest_valid_one(key, value, problem):
    with pytest.raises(ConfigError) as caught:
        changed(key, value)
    assert str(caught.value).startswith(f"{key}: {problem}")


def test_what_is_asked_for_and_not_there_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^there is no system 'pcle'; did you mean 'pcie'\?$"):
        LIBRARY.run("pcle", "rm1")
    with pytest.raises(ConfigError, match=r"^there is no model 'm1'; did you mean 'rm1'\?$"):
        LIBRARY.run("cxl", "m1")
    with pytest.raises(ConfigError, match=r"there is no device 'pmem-modul'; did you mean 'pmem-module'\?$"):
        changed("systems.cxl.devices.tables", "pmem-modul").run("cxl", "rm1")


def test_what_a_run_cannot_do_names_its_system():
    with pytest.raises(
        ConfigError, match=r"^system 'CXL': a stage has rows = \"missed\", and the system has no cache$"
    ):
        changed("systems.cxl.stages.lookup.rows", "missed").run("cxl", "rm1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in ("devices", "models", "systems"):
        (tmp_path / kind).mkdir()
    return tmp_path


def test_a_users_file_hides_the_packaged_one_of_its_name_and_adds_others(folder):
    faster = (PACKAGED / "devices" / "pcie.toml").read_text().replace("start_s = ", "start_s = 1")
    (folder / "devices" / "pcie.toml").write_text(faster)
    (folder / "devices" / "mine.toml").write_text(faster)
    found = read_library([folder])
    assert found.device("pcie") == found.device("mine") != LIBRARY.device("pcie")
    assert set(found.devices) == set(LIBRARY.devices) | {"mine"}
    assert found.models == LIBRARY.models
    assert found.run("pcie", "rm1").batch_s != LIBRARY.run("pcie", "rm1").batch_s


def test_of_two_folders_the_later_one_hides_the_earlier(folder, tmp_path):
    later = tmp_path / "later"
    (later / "models").mkdir(parents=True)
    text = (PACKAGED / "models" / "rm1.toml").read_text()
    (folder / "models" / "own.toml").write_text(text)
    (later / "models" / "own.toml").write_text(text.replace("dim = 32", "dim = 8"))
    assert read_library([folder, later]).model("own").tables[0].dim == 8
    assert read_library([later, folder]).model("own").tables[0].dim == 32


def test_a_users_system_builds_on_the_users_own_before_the_packages(folder):
    (folder / "systems" / "mine.toml").write_text('base = "cxl-d"\ntitle = "Mine"\n')
    assert read_library([folder]).system("mine").devices["link"] == "cxl"
    (folder / "systems" / "cxl-d.toml").write_text('base = "pcie"\n[devices]\nlink = "pcie"\n')
    found = read_library([folder])
    assert found.system("mine").devices["link"] == "pcie"
    assert found.system("mine").title == "Mine"


def test_a_path_to_a_file_reads_as_well(folder):
    path = folder / "systems" / "mine.toml"
    path.write_text('base = "pcie"\ntitle = "Mine"\n')
    assert read_system(path).title == "Mine"
    copied = folder / "anything.toml"
    copied.write_text((PACKAGED / "models" / "rm2.toml").read_text())
    assert read_model(copied) == LIBRARY.model("rm2")


@pytest.mark.parametrize(
    ("kind", "name", "old", "new", "problem"),
    [
        ("devices", "pcie", "start_s", "stat_s", r"pcie\.toml: device\.stat_s: unknown key; did you mean start_s\?"),
        ("devices", "pcie", '"link"', '"links"', r"pcie\.toml: device\.kind: found \"links\".*did you mean link\?"),
        ("devices", "pcie", "[device]", "[devices]", r"pcie\.toml: devices: unknown key; did you mean device\?"),
        ("devices", "pcie", "start_s = ", "start_s = -", r"pcie\.toml: device: start_s = -.*; it must be 0 or more"),
        ("models", "rm1", "count = 20", "count = 0", r"rm1\.toml: tables\[0\]: count = 0; it must be more than 0"),
        ("models", "rm1", "bottom = [", "botom = [", r"rm1\.toml: botom: unknown key; did you mean bottom\?"),
        ("systems", "pmem", '"lookup"]', '"lokup"]', r"pmem\.toml: stages\.move_pooled\.after: there is no stage 'lo"),
        ("systems", "cxl-d", '"pcie"', '"pci"', r"cxl-d\.toml: base: there is no system 'pci' .*; did you mean 'pcie"),
        ("systems", "cxl-d", "base", "bse", r"cxl-d\.toml: bse: unknown key; did you mean base\?"),
        ("systems", "cxl-d", "base = ", "base = [", r"cxl-d\.toml: cannot be read: .*line"),
    ],
)
def test_a_mistake_in_a_users_copy_names_file_and_key_and_the_nearest_valid_one(folder, kind, name, old, new, problem):
    text = (PACKAGED / kind / f"{name}.toml").read_text()
    assert old in text
    (folder / kind / f"{name}.toml").write_text(text.replace(old, new, 1))
    library = read_library([folder])
    with pytest.raises(ConfigError, match=problem):
        getattr(library, kind.removesuffix("s"))(name)
    with pytest.raises(ConfigError, match=problem):
        library.changed({f"{kind}.{name}.source": "other"})
    assert set(library.broken) >= {f"{kind}.{name}"}


@pytest.mark.parametrize(
    ("kind", "name", "system"), [("devices", "pcie", "cxl"), ("models", "rm1", "cxl"), ("systems", "cxl-d", "pmem")]
)
def test_a_broken_file_stops_only_what_asks_for_it(folder, kind, name, system):
    (folder / kind / f"{name}.toml").write_text("not TOML")
    library = read_library([folder])
    assert library.run(system, "rm2").batch_s == LIBRARY.run(system, "rm2").batch_s
    stopped = {"devices": ("pmem", "rm2"), "models": ("cxl", "rm1"), "systems": ("cxl-d", "rm2")}[kind]
    with pytest.raises(ConfigError, match=rf"{name}\.toml: .*Expected"):
        library.run(*stopped)


@pytest.mark.parametrize("system", ["pcie", "cxl-d", "cxl-b", "cxl"])
def test_near_memory_nothing_else_wants_the_modules_while_one_does(system):
    library = read_library()
    shared = library.changed({"devices.pmem-module.shared": True, "devices.near-memory-logic.parallelism": 2})
    for model in ("rm1", "rm2", "rm3", "rm4"):
        assert shared.run(system, model).batch_s == pytest.approx(library.run(system, model).batch_s, rel=1e-9)


def test_a_caches_share_is_changed_in_one_system_or_in_all_that_have_a_cache():
    library = read_library()
    one = library.changed({"systems.scratchpipe.cache.share": 0.3})
    assert [one.system(name).cache.share for name in ("scratchpipe", "scratchpipe-lru")] == [0.3, 0.1]
    every = library.changed({"systems.*.cache.share": 0.3})
    assert {each.cache.share for each in every.systems.values() if each.cache} == {0.3}
    assert every.system("dram") == library.system("dram")
    with pytest.raises(ConfigError, match=r"systems\.dram\.cache\.share: system 'DRAM' has no cache"):
        library.changed({"systems.dram.cache.share": 0.3})
