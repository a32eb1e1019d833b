"""`holdfast sim` as a user meets it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from holdfast import cli
from holdfast_lab.sim.scenario import read_scenario

pytestmark = pytest.mark.dear

SYSTEMS = ("pmem", "pcie", "cxl-d", "cxl-b", "cxl", "dram")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Sim = Callable[..., Result]


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sim:
    """`holdfast sim` in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["holdfast", "sim", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def answer(sim: Sim, *arguments: object) -> dict:
    result = sim(*arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_list_names_everything_that_run_takes(sim: Sim) -> None:
    plain = answer(sim, "list")
    assert set(SYSTEMS) <= set(plain["systems"])
    shown = sim("list")
    assert shown.code == 0, shown.err
    for kind in ("systems", "models", "devices"):
        for name, what in plain[kind].items():
            assert name in shown.out
            assert what["source"]


def test_show_has_every_value_of_a_system_with_where_it_is_from_and_what_it_overrides(sim: Sim) -> None:
    parts = answer(sim, "show", "cxl-b")
    of_system = parts.pop("")
    link = of_system["devices.link"]
    assert (link["value"], Path(link["file"]).stem, link["overridden"]) == ("cxl", "cxl-d", {"pmem": "pcie"})
    title = of_system["title"]
    assert title["value"] == "CXL-B"
    assert list(title["overridden"].items()) == [("cxl-d", "CXL-D"), ("pcie", "PCIe"), ("pmem", "PMEM")]
    scenario = read_scenario("cxl-b", "rm1")
    assert set(parts) == {f"{role}: {name}" for role, name in scenario.declared.devices.items()}
    for name, stage in scenario.declared.stages.items():
        if stage.after:
            assert tuple(of_system[f"stages.{name}.after"]["value"]) == stage.after
    shown = sim("show", "cxl-b").out
    assert "[stages.lookup]" in shown and 'link = "cxl"  # cxl-d, over pmem: "pcie"' in shown


def test_a_users_file_is_shown_over_the_packages_and_by_its_path(sim: Sim, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "cxl"\ntitle = "Mine"\n')
    title = answer(sim, "show", str(mine))[""]["title"]
    assert (title["value"], Path(title["file"])) == ("Mine", mine)
    assert title["overridden"]["cxl"] == "CXL"


def test_list_says_which_files_are_not_usable_and_goes_on(sim: Sim, tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "bad.toml").write_text("[device]\nkind = 'lnk'\n")
    shown = sim("list", "--folder", tmp_path)
    assert shown.code == 0 and "not usable: " in shown.out and "bad.toml: device.kind" in " ".join(shown.out.split())
    assert set(answer(sim, "list", "--folder", tmp_path)["not_usable"]) == {"devices.bad"}
    assert sim("run", "cxl", "--model", "rm1", "--folder", tmp_path).code == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_exposed_of_stages_sums_to_the_batch(sim: Sim, system: str) -> None:
    plain = answer(sim, "run", system, "--model", "rm1")
    exposed = sum(stage["exposed_ms"] for stage in plain["stages"].values()) + plain["waiting_ms"]
    assert exposed == pytest.approx(plain["batch_ms"], rel=1e-9)
    assert all(-1e-9 <= stage["exposed_ms"] <= stage["ms"] + 1e-9 for stage in plain["stages"].values())
    assert sum(device["joules_per_batch"] for device in plain["devices"].values()) == pytest.approx(
        plain["joules_per_batch"]
    )


def test_a_run_shows_its_stages_its_devices_and_a_timeline(sim: Sim) -> None:
    plain = answer(sim, "run", "cxl-d", "--model", "rm1")
    result = sim("run", "cxl-d", "--model", "rm1")
    assert result.code == 0, result.err
    assert f"CXL-D with rm1: {plain['batch_ms']:.3f} ms per batch of" in result.out
    for name in (*plain["stages"], *plain["devices"]):
        assert name in result.out
    gpu = next(line for line in reversed(result.out.splitlines()) if line.startswith("gpu"))
    order = [letter for n, letter in enumerate(gpu.split()[1]) if n == 0 or gpu.split()[1][n - 1] != letter]
    assert order == ["B", "D", "F", "·"]


def test_a_typo_in_a_name_suggests_the_near_one(sim: Sim) -> None:
    result = sim("run", "cxl-bb", "--model", "rm1")
    assert result.code == 1
    assert "there is no system 'cxl-bb'; did you mean 'cxl-b'?" in result.err
    assert "did you mean 'rm1'?" in sim("run", "cxl", "--model", "rm11").err
    assert "did you mean 'cxl-b'?" in sim("copy", "systems", "cxl-bb").err
    assert "did you mean 'cxl-b'?" in sim("sweep", "cxl-bb", "--model", "rm1", "--vary", "model.batch_size=1,2").err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "devices.pcie.bandwith_bytes_per_s=1e9",
            "devices.pcie.bandwith_bytes_per_s: there is no 'bandwith_bytes_per_s'",
        ),
        ("devices.pci.start_s=1", "devices.pci.start_s: there is no device 'pci'; did you mean 'pcie'?"),
        ("devices.pcie.start_s=fast", 'devices.pcie.start_s: found "fast" (a string), expected a number'),
        ("devices.pcie.start_s=-1", "devices.pcie.start_s: start_s = -1.0; it must be 0 or more"),
        ("model.batch_size=0", "models.rm1.batch_size: batch_size = 0.0; it must be more than 0"),
        ("stages.lookup.par=1", "systems.cxl.stages.lookup.par: there is no 'par'; did you mean 'part'?"),
        ("stages.lokup.part=1", "there is no stage 'lokup'; did you mean 'lookup'?"),
        ("batch_size=3", "batch_size: it begins with none of devices, models, systems"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_run(sim: Sim, setting: str, words: str) -> None:
    result = sim("run", "cxl", "--model", "rm1", "--set", setting, "--trace", "trace.json")
    assert result.code == 1
    assert words in result.err
    assert not Path("trace.json").exists()


def test_a_setting_without_a_value_is_a_wrong_command_line(sim: Sim) -> None:
    result = sim("run", "cxl", "--model", "rm1", "--set", "model.batch_size")
    assert result.code == 2
    assert "no KEY=VALUE" in result.err


def test_short_settings_are_the_long_ones_of_what_was_chosen(sim: Sim) -> None:
    plain = answer(sim, "run", "cxl", "--model", "rm1")
    pairs = [
        ("model.batch_size=512", "models.rm1.batch_size=512"),
        ("stages.log_network.part=1", "systems.cxl.stages.log_network.part=1"),
        ("system.devices.link=pcie", "systems.cxl.devices.link=pcie"),
    ]
    for short, long in pairs:
        shorter = answer(sim, "run", "cxl", "--model", "rm1", "--set", short)
        assert shorter == answer(sim, "run", "cxl", "--model", "rm1", "--set", long)
        assert shorter["batch_ms"] > plain["batch_ms"]


def test_a_copied_and_edited_device_is_used(sim: Sim) -> None:
    before = answer(sim, "run", "pcie", "--model", "rm1")
    result = sim("copy", "devices", "pcie")
    assert result.code == 0, result.err
    copied = Path("devices/pcie.toml")
    assert answer(sim, "run", "pcie", "--model", "rm1", "--folder", ".") == before
    copied.write_text(
        copied.read_text()
        .replace('kind = "link"', 'kind = "link"\nlatency_s = 1e-3 #')
        .replace("latency_s = 1e-6\n", "")
    )
    after = answer(sim, "run", "pcie", "--model", "rm1", "--folder", ".")
    assert after["stages"]["move_pooled"]["ms"] == pytest.approx(before["stages"]["move_pooled"]["ms"] + 0.999)
    assert answer(sim, "run", "pcie", "--model", "rm1") == before


def test_a_copied_and_edited_system_or_model_is_used_by_its_path(sim: Sim) -> None:
    before = answer(sim, "run", "cxl", "--model", "rm1")
    assert sim("copy", "systems", "cxl", "-o", "mine.toml").code == 0
    assert sim("copy", "models", "rm1", "-o", "big.toml").code == 0
    mine, big = Path("mine.toml"), Path("big.toml")
    mine.write_text(mine.read_text().replace('base = "cxl-b"', 'base = "cxl-d"'))
    other = answer(sim, "run", "mine.toml", "--model", "rm1")
    assert other["batch_ms"] > before["batch_ms"]
    big.write_text(big.read_text().replace("lookups = 80", "lookups = 160"))
    twice = answer(sim, "run", "cxl", "--model", "./big.toml")["workload"]["accesses"]
    assert twice == 2 * before["workload"]["accesses"]


def test_copy_refuses_to_overwrite_unless_asked(sim: Sim) -> None:
    assert sim("copy", "models", "rm1", "-o", "rm1.toml").code == 0
    Path("rm1.toml").write_text("mine")
    result = sim("copy", "models", "rm1", "-o", "rm1.toml")
    assert result.code == 1
    assert "rm1.toml is there already" in result.err
    assert Path("rm1.toml").read_text() == "mine"
    assert sim("copy", "models", "rm1", "-o", "rm1.toml", "--overwrite").code == 0
    assert "batch_size" in Path("rm1.toml").read_text()


def test_a_folder_without_declarations_is_named(sim: Sim) -> None:
    result = sim("run", "cxl", "--model", "rm1", "--folder", ".")
    assert result.code == 1
    assert "folder .: it has none of devices/, models/, systems/" in result.err


def test_the_configuration_of_a_run_is_a_model(sim: Sim) -> None:
    run = Path(__file__).parents[2] / "examples" / "criteo_synthetic.toml"
    plain = answer(sim, "run", "cxl", "--model", run)
    assert plain["model"] == "criteo_synthetic"
    assert plain["workload"]["num_tables"] == 26


def test_a_trace_adds_up_to_the_time_that_devices_are_busy(sim: Sim) -> None:
    plain = answer(sim, "run", "cxl-b", "--model", "rm1", "--trace", "trace.json", "--batches", 8)
    events = json.loads(Path("trace.json").read_text())
    roles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for role, device in plain["devices"].items():
        steps = [e for e in events if e["ph"] == "X" and roles[e["tid"]] == role and e["args"]["step"] == 5]
        assert sum(event["dur"] for event in steps) * 1e-3 == pytest.approx(device["busy_ms"])
    result = sim("run", "cxl-b", "--model", "rm1", "--trace", "trace.json")
    assert result.code == 1
    assert "trace.json is there already" in result.err


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_is_written_as_a_page_with_its_figures_and_numbers(sim: Sim) -> None:
    arguments = ("run", "cxl", "--model", "rm1", "-o", "out")
    result = sim(*arguments)
    assert (result.code, result.out.strip()) == (0, "out/index.html"), result.err
    names = {"index.html", *(f"{figure}.{kind}" for figure in ("batch-time", "timeline") for kind in ("svg", "csv"))}
    assert {path.name for path in Path("out").iterdir()} == names
    text = Path("out/index.html").read_text()
    assert f"{answer(sim, 'run', 'cxl', '--model', 'rm1')['batch_ms']:.3f} ms per batch" in text
    assert text.count("<svg ") == 2 and "checkpoint-dma" in text
    assert sim(*arguments).code == 1
    assert sim(*arguments, "--overwrite").code == 0


def test_a_sweep_writes_the_numbers_that_run_gives(sim: Sim) -> None:
    vary = "model.batch_size=64:1024:3"
    result = sim("sweep", "cxl", "--model", "rm1", "--against", "pmem", "--vary", vary, "-o", "out")
    assert result.code == 0, result.err
    rows = rows_of("out/sweep.csv")
    assert [(row["model.batch_size"], row["system"]) for row in rows] == [
        (size, system) for size in ("64", "256", "1024") for system in ("cxl", "pmem")
    ]
    for row in rows:
        setting = f"model.batch_size={row['model.batch_size']}"
        plain = answer(sim, "run", row["system"], "--model", "rm1", "--set", setting)
        assert float(row["batch_ms"]) == plain["batch_ms"]
        assert float(row["joules_per_batch"]) == plain["joules_per_batch"]
        assert f"{plain['batch_ms']:.3f}" in result.out
    assert Path("out/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path("out").iterdir()) == ["sweep.csv", "sweep.png"]


def test_a_sweep_over_words_has_a_row_for_each(sim: Sim) -> None:
    result = sim("sweep", "cxl", "--model", "rm1", "--vary", "system.devices.link=pcie,cxl", "-o", "out")
    assert result.code == 0, result.err
    slow, fast = rows_of("out/sweep.csv")
    assert (slow["system.devices.link"], fast["system.devices.link"]) == ("pcie", "cxl")
    assert float(slow["batch_ms"]) > float(fast["batch_ms"])


def test_a_sweep_does_not_begin_where_its_files_are_there_already(sim: Sim) -> None:
    Path("out").mkdir()
    Path("out/sweep.png").write_text("mine")
    arguments = ("sweep", "cxl", "--model", "rm1", "--vary", "model.batch_size=64,128", "-o", "out")
    result = sim(*arguments)
    assert result.code == 1
    assert "sweep.png is there already" in result.err
    assert [path.name for path in Path("out").iterdir()] == ["sweep.png"]
    assert sim(*arguments, "--overwrite").code == 0
    assert Path("out/sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "vary", ["model.batch_size", "=3", "model.batch_size=0:8:3", "model.batch_size=1:8:x", "a=1:2:1"]
)
def test_a_wrong_variation_is_shown(sim: Sim, vary: str) -> None:
    result = sim("sweep", "cxl", "--model", "rm1", "--vary", vary)
    assert result.code == 1
    assert repr(vary) in result.err


def test_two_systems_of_one_name_are_told_apart_by_what_was_given(sim: Sim) -> None:
    assert sim("copy", "systems", "cxl", "-o", "cxl.toml").code == 0
    text = Path("cxl.toml").read_text()
    Path("cxl.toml").write_text(text.replace('base = "cxl-b"', 'base = "cxl-d"'))
    vary = ("--vary", "model.batch_size=256", "--json")
    rows = json.loads(sim("sweep", "cxl", "--against", "./cxl.toml", "--model", "rm1", *vary).out)
    assert [row["system"] for row in rows] == ["cxl", "./cxl.toml"]
    assert rows[0]["batch_ms"] < rows[1]["batch_ms"]


@pytest.mark.parametrize("missing", ["simpy", "matplotlib"])
def test_what_is_not_installed_is_named_with_the_extra_that_has_it(tmp_path: Path, missing: str) -> None:
    without = f"import sys; sys.modules[{missing!r}] = None; from holdfast.cli import main; main()"
    vary = ("--vary", "model.batch_size=64,128", "-o", str(tmp_path))
    command = [sys.executable, "-c", without, "sim", "sweep", "cxl", "--model", "rm1", *vary]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert missing in result.stderr
    assert "pip install 'holdfast[sim]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_interrupted_in_the_middle_it_leaves_no_half_written_file(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(figure: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", half)
    result = sim("sweep", "cxl", "--model", "rm1", "--vary", "model.batch_size=64,128", "-o", "out")
    assert result.code == 130
    assert [path.name for path in Path("out").iterdir()] == ["sweep.csv"]
    assert len(rows_of("out/sweep.csv")) == 2


def test_settings_apply_in_order() -> None:
    twice = read_scenario("cxl", "rm1", ["model.batch_size=64", "model.batch_size=128"])
    assert twice.library.model("rm1").batch_size == 128
