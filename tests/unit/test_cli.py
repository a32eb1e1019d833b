"""The command line as a user meets it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from left_behind import left_behind

from cli_runs import CONFIG, Commands, start
from holdfast.errors import ConfigError
from holdfast.files.config import read_config, to_plain
from holdfast.run.assembly import open_trainer
from holdfast.run.changes import refuse_changes
from holdfast.run.sections import RunConfig

pytestmark = pytest.mark.dear


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_bytes().splitlines()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_prints_how_it_began_and_its_auc(holdfast: Commands) -> None:
    result = holdfast.train()
    assert result.code == 0, result.err
    first, *_, last = result.out.splitlines()
    assert "new pool" in first
    assert "step 1 of 20" in first
    assert last.startswith("trained to step 20: AUC 0.")


def test_a_working_directory_that_was_removed_is_said(holdfast: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := holdfast.root / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = holdfast("inspect", holdfast.root / "pool")
    assert result.code == 1
    assert result.err == "holdfast: the working directory was removed: change to one that is there\n"


def test_batches_that_are_larger_than_the_data_are_said(holdfast: Commands) -> None:
    assert "goes over" not in holdfast.train("whole", "--set", "train.batch_size=640").out
    out = holdfast.train("many", "--set", "train.batch_size=1600").out
    assert "each batch of 1,600 goes over the 640 samples that there are 2.5 times" in out


def test_killed_in_the_middle_and_started_again_it_ends_with_the_digest_of_an_uninterrupted_run(
    holdfast: Commands,
) -> None:
    many = ("--set", "train.epochs=200", "--set", "validation.num_samples=50")
    metrics = holdfast.root / "metrics.jsonl"
    command = ("train", holdfast.config, "--pool", holdfast.root / "killed", "--metrics", metrics, *many)
    process = start(*command)
    wait_for_lines(metrics, 30, process)
    process.kill()
    process.communicate()
    reached = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()[:-1])][-1]
    assert 29 <= reached < 4000
    steps = ("--steps", reached + 20)
    again = holdfast(*command, *steps)
    assert again.code == 0, again.err
    assert "not closed cleanly: last durable step" in again.out
    assert holdfast.train("whole", *many, *steps).code == 0
    assert holdfast.digest("killed") == holdfast.digest("whole")
    durable = re.search(r"last durable step (\d+)", again.out)
    assert durable is not None
    # The kill may come between a step and its line.
    expected = [*range(1, reached + 21), reached + 20]
    without_it = [step for step in expected if step != int(durable[1])]
    assert [line["step"] for line in lines_of(metrics)] in (expected, without_it)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_makes_it_durable(holdfast: Commands, number: signal.Signals, code: int) -> None:
    metrics = holdfast.root / "metrics.jsonl"
    process = start(
        *("train", holdfast.config, "--pool", holdfast.root / "pool", "--metrics", metrics),
        *("--set", "train.epochs=2000", "--set", "pool.dense_interval=50"),
    )
    wait_for_lines(metrics, 10, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    step = lines_of(metrics)[-1]["step"]
    assert f"{number.name}: step {step} is finished and durable" in out
    found = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    assert (found["clean"], found["step"], found["dense_step"]) == (True, step, step)


def crashed_copy(holdfast: Commands, name: str, steps: int) -> None:
    """A pool as it is when its process dies after `steps` steps, none of them with a dense state."""
    config = read_config(RunConfig, holdfast.config, ["pool.dense_interval=100"])
    with open_trainer(config, holdfast.root / f"{name}.alive") as trainer:
        for _, _ in zip(range(steps), trainer.steps(), strict=False):
            pass
        trainer.pool.flush()
        left_behind(holdfast.root / f"{name}.alive", holdfast.root / name)


def test_exact_recovery_goes_back_and_relaxed_recovery_keeps_the_newest_rows(holdfast: Commands) -> None:
    crashed_copy(holdfast, "exact", 10)
    crashed_copy(holdfast, "relaxed", 10)
    first = holdfast.train("exact").out.splitlines()[0]
    assert "rolled back 10 steps" in first
    assert "goes on at step 1 of 20" in first
    first = holdfast.train("relaxed", "--recovery", "relaxed").out.splitlines()[0]
    assert "kept the rows of step 10 beside the dense state of step 0 (relaxed)" in first
    assert "goes on at step 11 of 20" in first
    holdfast.train("whole")
    assert holdfast.digest("exact") == holdfast.digest("whole")
    assert holdfast.digest("relaxed") != holdfast.digest("whole")


def test_row_checksums_change_no_digest_and_name_a_row_whose_bytes_have_changed(holdfast: Commands) -> None:
    checked = ("--set", "pool.row_checksums=true", "--set", "pool.medium=memory")
    assert holdfast.train("checked", *checked, "--steps", 10).code == 0
    holdfast.train("plain", "--set", "pool.medium=memory", "--steps", 10)
    assert holdfast.digest("checked") == holdfast.digest("plain")
    assert "every row has a checksum" in holdfast("inspect", holdfast.root / "checked").out
    assert "rows have no checksums" in holdfast("inspect", holdfast.root / "plain").out

    refused = holdfast.train("plain", *checked)
    assert refused.code == 1
    assert "row_checksums = true, but the pool" in refused.err

    weights = holdfast.root / "checked/shard-0000/table-0001.weights"  # seven rows, all of them in every batch
    flipped = bytearray(weights.read_bytes())
    flipped[3 * 16] ^= 1
    weights.write_bytes(flipped)
    for result in (
        holdfast("verify", holdfast.root / "checked"),
        holdfast.train("checked", "--set", "train.epochs=2"),
    ):
        assert result.code == 1
        assert f"{weights} at offset 48: row 3 of table" in result.err
        assert "restore a snapshot" in result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["train", "--help"], "goes on"), (["--version"], f"holdfast {version('holdfast')}, with torch")],
)
def test_help_and_version_answer_without_importing_torch(arguments: list[str], says: str) -> None:
    code = (
        f"import sys\nfrom holdfast import cli\nsys.argv = {['holdfast', *arguments]}\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(("loads", "is_left"), [("", True), ("sys.modules['triton'] = sys", False)])
def test_a_command_ends_without_searching_for_garbage_in_torch_and_in_silence(loads: str, is_left: bool) -> None:
    code = (
        f"import atexit, gc, sys, torch\n{loads}\n"
        "from holdfast import cli\nsys.argv = ['holdfast', 'inspect', '/nowhere']\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"  # called after what is registered later
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "assert gc.get_freeze_count() == 0"  # whoever runs a command in its own process keeps its collector
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 100_000) == is_left
    assert done.stderr == "holdfast: /nowhere holds no pool\n"


def test_a_typo_in_the_configuration_is_named_with_what_was_meant(holdfast: Commands) -> None:
    holdfast.config.write_text(CONFIG.replace("batch_size", "batchsize"))
    result = holdfast.train()
    assert result.code == 1
    assert "train.batchsize" in result.err
    assert "did you mean batch_size?" in result.err
    assert "Traceback" not in result.err
    assert not (holdfast.root / "pool").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.bottom=[8, 5]", "model.bottom"),
        ("model.top=[8]", "model.top"),
        ("embedding.betas=[0.9, 0.99]", "embedding.betas"),
        ("optimizer.momentum=0.9", "optimizer.momentum"),
        ("optimizer.lr=nan", "optimizer.lr = nan; it must be finite"),
        ("optimizer.betas=[0.9, nan]", "optimizer.betas = (0.9, nan); it must be finite"),
        ("optimizer={name='RAdam', weight_decay=inf}", "optimizer.weight_decay = inf; it must be finite"),
        ("train.batch_size=0", "train.batch_size"),
        ("embedding.lr=-1", "lr"),
        ("validation.num_samples=0", "validation"),
        ("data.parquet.label='x'", "data"),
    ],
)
def test_a_wrong_value_is_named_and_no_pool_is_made(holdfast: Commands, override: str, named: str) -> None:
    result = holdfast.train("pool", "--set", override)
    assert result.code == 1
    assert named in result.err
    assert not (holdfast.root / "pool").exists()


@pytest.mark.parametrize(
    "arguments", [("--set", "nonsense"), ("--steps", "-1"), ("--on-bad-row", "skip"), ("--no-such-option",)]
)
def test_a_wrong_command_line_exits_2(holdfast: Commands, arguments: tuple[str, ...]) -> None:
    assert holdfast.train("pool", *arguments).code == 2
    assert not (holdfast.root / "pool").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train", "run.toml", "--pool", ""), "--pool"),
        (("train", "run.toml", "--pool=", "--steps", "1"), "--pool"),
        (("train", "run.toml", "--pool", "new", "--metrics", ""), "--metrics"),
        (("train", "run.toml", "", "--pool", "new"), "CONFIG.toml"),
        (("inspect", ""), "POOL"),
        (("snapshot", "new", ""), "DEST"),
        (("import", "", "run.toml", "--pool", "new"), "IN"),
        (("data", "synth", ""), "OUT"),
    ],
)
def test_an_empty_path_is_named_and_is_not_the_working_directory(
    holdfast: Commands, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(holdfast.root)
    there = sorted(holdfast.root.iterdir())
    result = holdfast(*arguments)
    assert (result.code, sorted(holdfast.root.iterdir())) == (2, there)
    assert named in result.err and "path is empty" in result.err


def test_a_path_that_is_not_utf8_is_named(holdfast: Commands) -> None:
    """It ended in a TypeError of the core's."""
    name = os.fsdecode(os.fsencode(holdfast.root / "pool-") + b"\xff")
    for arguments in (("inspect", name), ("train", "run.toml", "--pool", name), ("snapshot", "new", name)):
        result = holdfast(*arguments)
        assert result.code == 2
        assert r"pool-\udcff" in result.err.replace("\n", "") and "not UTF-8" in result.err
    assert not Path(name).exists()


def test_debug_shows_the_traceback(holdfast: Commands) -> None:
    with pytest.raises(Exception, match="no pool"):
        holdfast("inspect", holdfast.root / "nowhere", "--debug")
    result = holdfast("inspect", holdfast.root / "nowhere")
    assert (result.code, result.err.count("\n")) == (1, 1)


@pytest.mark.parametrize("more", [(), ("--set", "train.lanes=4")])
def test_batches_of_another_size_go_on_where_those_before_ended(holdfast: Commands, more: tuple[str, ...]) -> None:
    """640 samples an epoch, two of them: 5 batches of 32, and 1120 samples by 50."""
    larger = ("--set", "train.epochs=2", "--set", "train.batch_size=50", *more)
    for pool, stops in (("whole", ()), ("pool", (9, 20))):
        assert holdfast.train(pool, "--steps", 5, *more).code == 0
        for stop in stops:
            assert holdfast.train(pool, "--steps", stop, *larger).code == 0
        result = holdfast.train(pool, *larger)
        assert result.code == 0, result.err
        assert "step 28/28" in result.out
    assert holdfast.digest() == holdfast.digest("whole")
    assert holdfast.digest().cursor == 5 * 32 + 23 * 50
    result = holdfast.train("pool", *more, "--set", "train.epochs=2", "--set", "train.batch_size=11")
    assert "nothing is left to train up to step 28" in result.out + result.err


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.seed=1", "train.seed"),
        ("train.lanes=8", "train.lanes"),
        ("pool.seed=1", "pool.seed"),
        ("model.top=[9, 1]", "model.top"),
        ("embedding.optimizer='sgd'", "embedding.optimizer"),
        ("embedding.dtype='bf16'", "embedding.dtype"),
        ("data.synthetic.rows=[50, 7, 401]", "data.synthetic.rows"),
        ("data.synthetic.num_samples=641", "data.synthetic.num_samples"),
    ],
)
def test_a_change_that_the_pool_cannot_follow_is_refused_by_name(holdfast: Commands, override: str, field: str) -> None:
    holdfast.train("pool", "--steps", 3)
    before = holdfast.digest()
    result = holdfast.train("pool", "--set", override)
    assert result.code == 1
    assert f"{field}: was " in result.err
    assert holdfast.digest() == before


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size"])
def test_a_batch_beyond_any_memory_is_refused_before_a_pool_is_made(holdfast: Commands, name: str) -> None:
    result = holdfast.train("pool", "--set", f"train.{name}={10**20}")
    assert result.code == 1
    assert f"train.{name} = {10**20}; it must be at most 2,147,483,647" in result.err
    assert not (holdfast.root / "pool").exists()


def test_a_pool_of_before_there_were_lanes_has_one(holdfast: Commands) -> None:
    config = read_config(RunConfig, holdfast.config)
    saved = to_plain(config)
    del saved["train"]["lanes"]
    refuse_changes(saved, config)
    more = read_config(RunConfig, holdfast.config, ["train.lanes=8"])
    with pytest.raises(ConfigError, match=r"train\.lanes: was 1, is 8, but a pool cannot change that"):
        refuse_changes(saved, more)


def test_steps_workers_and_evaluation_may_change_and_leave_no_trace(holdfast: Commands) -> None:
    holdfast.train("plain")
    holdfast.train("pool", "--steps", 5, "--set", "train.workers=2")
    holdfast.train("pool", "--steps", 9, "--set", "train.prefetch=5", "--set", "pool.dense_interval=4")
    holdfast.train("pool", "--set", "train.eval_every=3", "--set", "validation.num_samples=100")
    assert holdfast.digest("pool") == holdfast.digest("plain")


def test_a_changed_learning_rate_is_applied_from_the_next_step_on(holdfast: Commands) -> None:
    holdfast.train("pool", "--steps", 5)
    holdfast.train("same", "--steps", 5)
    changed = ["embedding.lr=0.2", "optimizer.lr=0.5"]
    config = read_config(RunConfig, holdfast.config, changed)
    with open_trainer(config, holdfast.root / "pool") as trainer:
        assert trainer.rows.optimizer.param_groups[0]["lr"] == 0.2
        assert trainer.dense_optimizer.param_groups[0]["lr"] == 0.5
    overrides = [part for override in changed for part in ("--set", override)]
    holdfast.train("pool", *overrides, "--steps", 12)
    holdfast.train("pool", *overrides)
    holdfast.train("same", *overrides)
    holdfast.train("other")
    assert holdfast.digest("pool") == holdfast.digest("same")
    assert holdfast.digest("pool") != holdfast.digest("other")


def test_a_learning_rate_that_a_schedule_changed_stays_when_the_configuration_does_not_change(
    holdfast: Commands,
) -> None:
    config = read_config(RunConfig, holdfast.config)
    with open_trainer(config, holdfast.root / "pool") as trainer:
        trainer.rows.optimizer.param_groups[0]["lr"] = 0.03
        trainer.dense_optimizer.param_groups[0]["lr"] = 0.003
        next(trainer.steps())
    changed = read_config(RunConfig, holdfast.config, ["optimizer.weight_decay=0.1"])
    with open_trainer(changed, holdfast.root / "pool") as trainer:
        assert trainer.rows.optimizer.param_groups[0]["lr"] == 0.03
        assert trainer.dense_optimizer.param_groups[0]["lr"] == 0.003
        assert trainer.dense_optimizer.param_groups[0]["weight_decay"] == 0.1


def test_metrics_have_every_field_of_every_step_and_the_end(holdfast: Commands) -> None:
    path = holdfast.root / "metrics.jsonl"
    holdfast.train("pool", "--metrics", path)
    *steps, end = lines_of(path)
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert all(
        set(line) == {"step", "durable_step", "loss", "samples_per_second", "logged_bytes", "stage_ms", "background_ms"}
        and line["logged_bytes"] > 0
        and set(line["stage_ms"]) == {"plan", "capture", "lookup", "train", "update", "commit"}
        and set(line["background_ms"]) <= {"persist", "dense"}
        for line in steps
    )
    assert all(any(stage in line["background_ms"] for line in steps) for stage in ("persist", "dense"))
    assert set(end) == {"event", "step", "auc", "logloss"}
    assert (end["event"], end["step"]) == ("end", 20)


def test_metrics_of_a_run_in_pieces_read_like_one_run(holdfast: Commands) -> None:
    path = holdfast.root / "metrics.jsonl"
    holdfast.train("pool", "--metrics", path, "--steps", 8)
    text = path.read_text()
    # What a crash leaves: steps that were rolled back, and half a line.
    path.write_text(text + '{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    holdfast.train("pool", "--metrics", path, "--set", "train.eval_every=10")
    found = [(line.get("event", "step"), line["step"]) for line in lines_of(path)]
    assert found == [
        *[("step", step) for step in range(1, 11)],
        ("evaluation", 10),
        *[("step", step) for step in range(11, 21)],
        ("end", 20),
    ]


def test_metrics_of_another_run_are_kept_and_other_files_are_refused(holdfast: Commands) -> None:
    path = holdfast.root / "metrics.jsonl"
    holdfast.train("first", "--metrics", path, "--steps", 2)
    text = path.read_text()
    holdfast.train("second", "--metrics", path, "--steps", 2)
    assert (holdfast.root / "metrics.jsonl.1").read_text() == text
    assert len(lines_of(path)) == 3
    notes = holdfast.root / "notes"
    notes.write_text("precious\n")
    result = holdfast.train("second", "--metrics", notes, "--steps", 4)
    assert (result.code, notes.read_text()) == (1, "precious\n")
    assert "something else than metrics" in result.err


@pytest.mark.parametrize("option", ["--metrics", "--trace"])
def test_what_a_run_shows_may_go_where_nothing_is_kept_and_never_moves_a_directory(
    holdfast: Commands, option: str
) -> None:
    output = holdfast.root / "stdout"  # as /dev/stdout is, which nobody should move away
    output.symlink_to("/proc/self/fd/1")
    for steps in (2, 4):  # a new pool, and one that goes on
        assert holdfast.train("pool", option, "/dev/null", "--steps", steps).code == 0
        shown = holdfast.train("shown", option, output, "--steps", steps)
        assert shown.code == 0, shown.err
        lines = shown.out.splitlines()
        if option == "--metrics":
            written = [json.loads(line) for line in lines if line.startswith("{")]
            assert [line["step"] for line in written] == [steps - 1, steps, steps]
        assert lines[0].startswith(f"{holdfast.root / 'shown'}: ")  # and nothing was written over it
        assert any(line.startswith(f"trained to step {steps}: AUC") for line in lines)
        assert output.is_symlink()
    folder = holdfast.root / "folder"
    (folder / "within").mkdir(parents=True)
    for pool in ("pool", "new"):
        result = holdfast.train(pool, option, folder, "--steps", 6)
        assert (result.code, result.err.rstrip().endswith(f"file {folder}: Is a directory")) == (1, True), result.err
        assert (folder / "within").is_dir()


def test_what_the_output_has_no_letters_for_is_shown_by_number(
    holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", shown)
    assert holdfast.train("p\u00fcol", "--steps", 2).code == 0
    text = shown.buffer.getvalue().decode("ascii")
    assert "p\\xfcol: new pool" in text
    assert "step 2/2 \\xb7 " in text


def test_a_loss_that_is_not_finite_stops_the_run_at_the_last_good_step(holdfast: Commands) -> None:
    result = holdfast.train("pool", "--set", "optimizer.name='sgd'", "--set", "optimizer.lr=1e30")
    assert result.code == 1
    assert "lower the learning rate" in result.err
    found = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    assert found["clean"]
    assert found["step"] == found["dense_step"] < 20
    assert holdfast("verify", holdfast.root / "pool").code == 0


def test_a_pool_in_use_is_inspected_and_evaluated_but_not_digested_verified_exported_or_trained(
    holdfast: Commands,
) -> None:
    config = read_config(RunConfig, holdfast.config)
    pool = holdfast.root / "pool"
    with open_trainer(config, pool) as trainer:
        for _ in trainer.steps():
            pass
        trainer.checkpoint.flush()
        found = json.loads(holdfast("inspect", pool, "--json").out)
        assert (found["in_use"], found["clean"], found["step"]) == (True, False, 20)
        out = holdfast("eval", holdfast.config, "--pool", pool).out
        commands = [("verify", pool), ("digest", pool), ("export", pool, holdfast.root / "out.safetensors")]
        for command in [*commands, ("train", holdfast.config, "--pool", pool)]:
            result = holdfast(*command)
            assert result.code == 1
            assert "is open for writing in " in result.err
    auc = out.split("AUC ")[1].split(",")[0]
    assert holdfast.train().out.splitlines()[-1].startswith(f"trained to step 20: AUC {auc}")


def test_inspect_says_for_people_what_it_says_for_programs(holdfast: Commands) -> None:
    holdfast.train("pool", "--steps", 4)
    text = holdfast("inspect", holdfast.root / "pool").out
    found = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    assert "closed cleanly" in text
    assert "rows at step 4" in text
    assert [table["name"] for table in found["tables"]] == ["C1", "C2", "C3"]
    assert [table["rows"] for table in found["tables"]] == [50, 7, 400]
    assert 0 < found["tables"][2]["touched_rows"] < 400
    assert found["recovery"]["would"] == "nothing to do"


def test_verify_names_the_file_that_is_damaged(holdfast: Commands) -> None:
    holdfast.train("pool", "--steps", 4)
    assert holdfast("verify", holdfast.root / "pool").code == 0
    for name in ("dense-0", "dense-1"):
        path = holdfast.root / "pool" / name
        data = bytearray(path.read_bytes())
        data[4096 + 100] ^= 1
        path.write_bytes(data)
    result = holdfast("verify", holdfast.root / "pool")
    assert result.code == 1
    assert "dense-" in result.err


def test_verify_repairs_what_it_can_and_says_what_it_did_and_what_it_left(holdfast: Commands) -> None:
    holdfast.train("pool", "--steps", 4)
    pool = holdfast.root / "pool"
    before = holdfast.digest("pool")
    assert holdfast("verify", pool, "--repair").out.startswith(f"{pool}: whole")

    def strike(name: str, offset: int) -> None:
        data = bytearray((pool / name).read_bytes())
        data[offset] ^= 1
        (pool / name).write_bytes(data)

    (older, newer) = sorted(
        ("dense-0", "dense-1"), key=lambda name: int.from_bytes((pool / name).read_bytes()[16:24], "little")
    )
    strike(older, 4200)
    assert holdfast("verify", pool).code == 1
    repaired = holdfast("verify", pool, "--repair")
    assert repaired.code == 0
    assert f"repaired: {pool / older} at offset 0" in repaired.out
    (backup,) = holdfast.root.glob("pool.repair-*.jsonl")
    assert str(backup) in repaired.out
    assert holdfast.digest("pool") == before
    strike(newer, 4200)
    left = holdfast("verify", pool, "--repair")
    assert left.code == 1
    assert f"{newer} at offset 0" in left.err and "left alone" in left.err and "holdfast restore" in left.err
    assert "--repair" in holdfast("verify", "--help").out


def test_a_malformed_line_is_named_or_skipped_and_counted(holdfast: Commands) -> None:
    data = holdfast.root / "clicks.tsv"
    assert holdfast("data", "synth", data, "--samples", 200).code == 0
    with data.open("a") as file:
        file.write("1\tnonsense\n")
    holdfast.config.write_text(
        '[data.criteo]\npaths = ["clicks.tsv"]\nnum_embeddings = 100\n[embedding]\ndim = 4\n'
        "[model]\nbottom = [4]\ntop = [1]\n[train]\nbatch_size = 50\n"
    )
    stopped = holdfast.train("strict")
    assert stopped.code == 1
    assert f"{data}, line 201" in stopped.err
    skipped = holdfast.train("lenient", "--on-bad-row", "skip")
    assert skipped.code == 0, skipped.err
    assert "1 malformed lines skipped" in skipped.out
    assert "trained to step 4" in skipped.out


def test_converted_text_trains_to_the_same_tables(holdfast: Commands) -> None:
    data, converted = holdfast.root / "clicks.tsv", holdfast.root / "clicks.parquet"
    holdfast("data", "synth", data, "--samples", 300)
    assert "300 samples" in holdfast("data", "convert", data, converted).out
    again = holdfast("data", "convert", data, converted)
    assert (again.code, "is there already" in again.err) == (1, True)
    rest = "[embedding]\ndim = 4\n[model]\nbottom = [4]\ntop = [1]\n[train]\nbatch_size = 50\n"
    holdfast.config.write_text(f'[data.criteo]\npaths = ["clicks.tsv"]\nnum_embeddings = 100\n{rest}')
    assert holdfast.train("text").code == 0
    sparse = "".join(f"C{n} = {{ column = 'C{n}', num_embeddings = 100 }}\n" for n in range(1, 27))
    dense = [f"I{n}" for n in range(1, 14)]
    holdfast.config.write_text(
        f'[data.parquet]\npaths = ["clicks.parquet"]\nlabel = "label"\ndense = {dense}\ndense_transform = "log1p"\n'
        f"[data.parquet.sparse]\n{sparse}{rest}"
    )
    assert holdfast.train("parquet").code == 0
    assert holdfast.digest("text").tables == holdfast.digest("parquet").tables


def test_what_a_run_shows_draws_no_random_numbers(holdfast: Commands) -> None:
    holdfast.train("quiet")
    tensorboard = holdfast.root / "tensorboard"
    result = holdfast.train(
        "loud",
        "--metrics",
        holdfast.root / "m.jsonl",
        "--tensorboard",
        tensorboard,
        "--trace",
        holdfast.root / "t.json",
    )
    assert result.code == 0, result.err
    assert any(tensorboard.iterdir())
    assert holdfast.digest("quiet") == holdfast.digest("loud")


def test_training_takes_no_random_numbers_from_whoever_calls_it(holdfast: Commands) -> None:
    holdfast.train("one")
    torch.manual_seed(12345)
    holdfast.train("two")
    assert holdfast.digest("one") == holdfast.digest("two")
