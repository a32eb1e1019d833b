"""What `make bench` measures: each measurement is one command in a process of its own, which prints one JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
SHAPES = ("kaggle", "rm1", "rm3")
OPTIMIZERS = ("rowwise_adagrad", "sgd")
PEERS = ("fbgemm", "torchrec", "embeddingbag")
ABLATION = ("redo_sync", "undo_sync", "committed", "checksummed", "relaxed_10", "relaxed_100", "bare")
SECTIONS = ("table1", "bf16", "commit", "ext4", "floor", "ablation", "checkpoints", "memory", "recovery")
BF16_SHAPES = ("kaggle", "rm3")
RECOVERY_INTERVALS = (1, 10)
STEPS_AFTER_OPENING = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured, and with what. ``quick`` shows that everything runs, and nothing else."""

    quick: bool
    rounds: int
    shapes: tuple[str, ...]
    sections: tuple[str, ...]
    medium: Path
    disk: Path
    python: Path
    peers_python: Path
    build: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One command. ``key`` names it in the results; ``peer`` says (shape, optimizer, bf16) of a peer that may be left
    out of later rounds if it is far from the best. ``dies``: the command ends by killing itself. ``makes``: a directory
    that it finds empty; ``cleanup``: one that goes after it."""

    key: str
    command: tuple[str, ...]
    rounds: int
    peer: tuple[str, str, bool] | None = None
    parse: str = "json"
    dies: bool = False
    cleanup: Path | None = None
    timeout_s: int = 600
    makes: Path | None = None


@dataclass(frozen=True, slots=True)
class _Amount:
    steps: int
    warmup: int
    batches: int


# Distinct batches are as many as their making allows: rm1's have 655,360 ids each.
_AMOUNTS = {"kaggle": _Amount(40, 10, 50), "rm1": _Amount(24, 6, 12), "rm3": _Amount(32, 8, 32)}
_QUICK = _Amount(4, 2, 4)


def key_of(system: str, shape: str, optimizer: str, *, bf16: bool = False, medium: str = "") -> str:
    """The name of a training measurement in the results."""
    return "/".join(part for part in (system, shape, optimizer, "bf16" if bf16 else "", medium) if part)


class _Plan:
    """Makes measurements; each key once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._made: dict[str, Measurement] = {}

    def measurements(self) -> list[Measurement]:
        return list(self._made.values())

    def _amount(self, shape: str) -> _Amount:
        return _QUICK if self.settings.quick else _AMOUNTS[shape]

    def _add(self, measurement: Measurement) -> None:
        there = self._made.get(measurement.key)
        if there is None or there.rounds < measurement.rounds:
            self._made[measurement.key] = measurement

    def peer(self, system: str, shape: str, optimizer: str, *, bf16: bool = False) -> None:
        amount = self._amount(shape)
        # Hundreds of milliseconds a step, and never the best.
        slow = system == "embeddingbag" and not self.settings.quick
        steps, warmup = (8, 2) if slow else (amount.steps, amount.warmup)
        command = (
            str(self.settings.peers_python), "-m", "peers", "--shape", shape, "--system", system, "--optimizer",
            optimizer, "--steps", str(steps), "--warmup", str(warmup), "--batches", str(amount.batches),
            *(("--bf16",) if bf16 else ()),
        )  # fmt: skip
        self._add(
            Measurement(
                key=key_of(system, shape, optimizer, bf16=bf16),
                command=command,
                rounds=self.settings.rounds,
                peer=(shape, optimizer, bf16),
            )
        )

    def ours(
        self,
        mode: str,
        shape: str,
        optimizer: str = "rowwise_adagrad",
        *,
        bf16: bool = False,
        rounds: int | None = None,
        long: bool = False,
    ) -> None:
        amount = self._amount(shape)
        steps, warmup = (amount.steps, amount.warmup) if not long or self.settings.quick else (100, 110)
        command = (
            *self._ours_command(mode), "--shape", shape, "--optimizer", optimizer, "--steps", str(steps), "--warmup",
            str(warmup), "--batches", str(amount.batches), "--medium",
            str(self.settings.medium), *(("--bf16",) if bf16 else ()),
            *(("--digest",) if not bf16 and not long else ()), *(("--no-embeddings",) if long else ()),
        )  # fmt: skip
        self._add(
            Measurement(
                key=key_of(mode, shape, optimizer, bf16=bf16),
                command=command,
                rounds=min(self.settings.rounds, rounds or self.settings.rounds),
            )
        )

    def on_disk(self, mode: str, shape: str) -> None:
        """The loop of the README over a pool on the disk that is opened again, or the same without a pool. As many
        different batches as steps: none is seen twice before it is warm."""
        steps = 4 if self.settings.quick else STEPS_AFTER_OPENING
        command = (
            *self._ours_command(mode), "--shape", shape, "--steps", str(steps), "--warmup", str(steps), "--batches",
            str(steps), "--medium", str(self.settings.disk), *(("--no-embeddings",) if mode == "bare" else ()),
        )  # fmt: skip
        self._add(
            Measurement(
                key=key_of(mode, shape, "rowwise_adagrad", medium="disk"), command=command, rounds=self.settings.rounds
            )
        )

    def _ours_command(self, mode: str) -> tuple[str, ...]:
        library = self.settings.build / "libbare.so"
        return (str(self.settings.python), "-m", "ours", "--mode", mode, "--bare-library", str(library))

    def floor(self) -> None:
        rounds = "1" if self.settings.quick else "8"
        for shape in self.settings.shapes:
            command = (
                str(self.settings.build / "kernels_bench"),
                "--threads",
                "2",
                "--rounds",
                rounds,
                "--shape",
                shape,
            )
            self._add(
                Measurement(key=f"floor/{shape}", command=command, rounds=self.settings.rounds, parse="kernels_bench")
            )

    def checkpoints(self) -> None:
        amount = self._amount("kaggle")
        for kind in ("torch_save", "dcp_async"):
            for every in (10, 100):
                steps = min(every, 20) if self.settings.quick else max(every, 20)
                command = (
                    str(self.settings.peers_python), "-m", "peers", "--shape", "kaggle", "--system", "fbgemm",
                    "--checkpoint", kind, "--every", str(min(every, steps)), "--steps", str(steps), "--warmup",
                    str(amount.warmup), "--batches", str(amount.batches), "--checkpoint-dir", str(self.settings.disk),
                )  # fmt: skip
                self._add(Measurement(key=f"checkpoint/{kind}/{every}", command=command, rounds=1))

    def memory(self) -> None:
        for shape in self.settings.shapes:
            amount = self._amount(shape)
            command = (
                *self._ours_command("memory"), "--shape", shape, "--medium", str(self.settings.medium), "--steps",
                str(amount.batches), "--batches", str(amount.batches),
            )  # fmt: skip
            self._add(Measurement(key=f"memory/{shape}", command=command, rounds=1))

    def recovery(self) -> None:
        for interval in RECOVERY_INTERVALS:
            directory = self.settings.medium / f"holdfast-bench-recovery-{interval}"
            options = ("--medium", str(directory), "--dense-interval", str(interval))
            self._add(
                Measurement(
                    key=f"recovery_fill/{interval}",
                    command=(*self._ours_command("recovery_fill"), *options),
                    rounds=self.settings.rounds,
                    dies=True,
                    makes=directory,
                )
            )
            self._add(
                Measurement(
                    key=f"recovery_open/{interval}",
                    command=(*self._ours_command("recovery_open"), *options),
                    rounds=self.settings.rounds,
                    cleanup=directory,
                )
            )


def _add_steps(plan: _Plan, shape: str, sections: tuple[str, ...]) -> None:
    """Whole steps: what is compared lies together, committed and bare above all."""
    for optimizer in OPTIMIZERS:
        if "table1" in sections or "commit" in sections:
            plan.ours("committed", shape, optimizer)
        if "commit" in sections:
            plan.ours("bare", shape, optimizer, rounds=1 if optimizer == "sgd" else None)
        for system in PEERS if "table1" in sections else ():
            plan.peer(system, shape, optimizer)
    if "bf16" in sections and shape in BF16_SHAPES:
        plan.ours("committed", shape, bf16=True)
        for system in PEERS:
            plan.peer(system, shape, "rowwise_adagrad")
            plan.peer(system, shape, "rowwise_adagrad", bf16=True)


def _add_ways_to_log(plan: _Plan, shape: str, sections: tuple[str, ...]) -> None:
    for mode in ABLATION if "ablation" in sections else ():
        plan.ours(mode, shape, rounds=2, long=mode == "relaxed_100")
    for mode in ("bare", "opened") if "ext4" in sections else ():
        plan.on_disk(mode, shape)


def measurements_of(settings: Settings) -> list[Measurement]:
    """Every measurement of the sections that are wanted, in the order of one round."""
    plan = _Plan(settings)
    for shape in settings.shapes:
        _add_steps(plan, shape, settings.sections)
        _add_ways_to_log(plan, shape, settings.sections)
    if "floor" in settings.sections:
        plan.floor()
    if "memory" in settings.sections:
        plan.memory()
    if "recovery" in settings.sections:
        plan.recovery()
    if "checkpoints" in settings.sections and "kaggle" in settings.shapes:
        plan.checkpoints()
    return plan.measurements()
