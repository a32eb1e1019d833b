"""Random combinations of everything, killed anywhere, against a model of what must be there.

    python tests/swarm/swarm.py --seconds 600 --jobs 2
    python tests/swarm/swarm.py --episodes 1 --seed 1234 --without window,threads

Episode n of a run has the seed `--seed` + n, which alone decides what it does; what the kernel makes of threads, and of
kills at a time, is not drawn. A failure says how to play it again, and the smallest set of options that still fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHIM = HERE.parent / "crash" / "fault_shim.cpp"
SHRINK_TRIES = 3
EPISODE_SECONDS = 300.0
GROUPS = 0.02  # of all episodes


def prepare() -> None:
    """Starts this program again, in the environment that it needs: the shim before the C library, one thread."""
    if os.environ.get("HOLDFAST_SWARM") == "1":
        return
    library = ROOT / "build" / "swarm" / "fault_shim.so"
    if not library.exists() or library.stat().st_mtime < SHIM.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        built = library.with_name(f"{library.name}.{os.getpid()}")
        line = ["g++", "-std=c++20", "-shared", "-fPIC", "-O1", str(SHIM), "-o", str(built), "-ldl"]
        subprocess.run(line, check=True)
        built.rename(library)
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [ROOT / "src", HERE, HERE.parent, *(HERE.parent / name for name in ("crash", "numerics", "distributed"))]
    environment = {
        **os.environ,
        **one,
        "HOLDFAST_SWARM": "1",
        "MKL_CBWR": "AUTO,STRICT",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "LD_PRELOAD": str(library),
        # Large pages: a fork copies a hundredth of the page tables.
        "PYTHONMALLOC": "malloc",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], environment)


def simplifications() -> dict[str, Callable[[Any], Any]]:
    """What can be taken from an episode, by name: `--without`."""

    def lives(**changes: Any) -> Callable[[Any], Any]:
        return lambda episode: replace(episode, lives=tuple(replace(life, **changes) for life in episode.lives))

    def run(**changes: Any) -> Callable[[Any], Any]:
        return lambda episode: replace(episode, run=replace(episode.run, **changes))

    def scripts(**changes: Any) -> Callable[[Any], Any]:
        return lambda episode: replace(
            episode, run=replace(episode.run, scripts=tuple(replace(step, **changes) for step in episode.run.scripts))
        )

    return {
        "beside": lives(beside=()),
        "verbs": lives(then=()),
        "faults": lives(fault=None),
        "slow": lives(slow_us=0),
        "rings": lives(refuse_rings=True),
        "threads": lives(threads=1),
        "window": lives(window=0),
        "flushes": lives(flush_every=0),
        "ahead": lives(capture_ahead=False),
        "relaxed-recovery": lives(recovery="exact"),
        "dense-interval": lives(dense_interval=1),
        "small-scratchpad": lives(scratchpad_bytes=1 << 20),
        "victims": lives(victim_bytes=0),
        "kills": lives(kill=None),
        "ends": lives(end="close"),
        "checksums": run(row_checksums=False),
        "disk": run(on_disk=False),
        "small-log": run(log_bytes=1 << 20),
        "weights": run(weighted=False),
        "relaxed-lookup": run(relaxed_lookup=False),
        "foreach": run(foreach=False),
        "schedules": run(lr_step=0),
        "micro-batches": scripts(micro_batches=1),
        "thrown-away": scripts(thrown_away=False),
        "evaluations": scripts(evaluates=False),
        "nan": scripts(nan=False),
        "bad-ids": scripts(bad_ids=False),
        "first-life": lambda episode: replace(episode, lives=episode.lives[1:]),
        "last-life": lambda episode: replace(episode, lives=episode.lives[:-1]),
    }


def of_seed(seed: int, without: list[str], plant: str | None = None) -> Any:
    from draw import draw
    from groups import draw_group

    if is_group(seed) and "groups" not in without:
        return draw_group(seed)
    episode = draw(seed)
    for name in without:
        if name != "groups":
            episode = simplifications()[name](episode)
    return episode if plant is None else replace(episode, plant=plant)


def is_group(seed: int) -> bool:
    return random.Random(f"kind {seed}").random() < GROUPS


def options_of(episode: Any) -> list[str]:
    """What is counted: every option that has few values."""
    if hasattr(episode, "case"):
        case = episode.case
        found = [f"group of {case.num_ranks} ranks, {case.memory_ranks} of them memory ranks"]
        found += [f"group {name}: {value}" for name, value in case.config["embedding"].items()]
        return [*found, f"group in a {'log store' if 'medium' in case.config['pool'] else 'pool in place'}"]
    found = [f"lives: {len(episode.lives)}", f"steps: {episode.run.steps}"]
    for thing, name in [(episode.run, "run"), *((life, "life") for life in episode.lives)]:
        for field in dataclasses.fields(thing):
            value = getattr(thing, field.name)
            if isinstance(value, str | bool) or (isinstance(value, int) and field.name not in ("seed", "until")):
                found.append(f"{name} {field.name}: {value}")
    for collection in episode.run.collections:
        found.append(f"rows {collection.optimizer}")
        found += [f"rows {table.dtype}, {table.pooling}" for table in collection.tables]
        keyed = [table for table in collection.tables if table.keyed]
        found += [f"rows with keys{', left behind' if table.leaves_keys else ''}" for table in keyed]
    for life in episode.lives:
        if life.kill is not None:
            stage = life.kill.stage if life.kill.stage in ("opening", "closing") else "a step"
            found += [f"kill {life.kill.how}", f"kill from {stage}"]
            found += [f"kill when {life.kill.point}"] if life.kill.point else []
        if life.fault is not None:
            found.append(f"fault {life.fault.call}: {life.fault.error}")
        found += [f"beside: {name}" for name, _ in life.beside] + [f"then: {name}" for name in life.then]
    for name in ("thrown_away", "evaluates", "nan", "bad_ids"):
        if any(getattr(step, name) for step in episode.run.scripts):
            found.append(f"step {name}")
    if any(step.micro_batches > 1 for step in episode.run.scripts):
        found.append("step micro-batches")
    return found


def attempt_group(ranks: Any, episode: Any) -> dict[str, Any]:
    """The same of a group, whose ranks another process forks."""
    from episode import Failed
    from groups import play_group

    with tempfile.TemporaryDirectory(prefix="holdfast-swarm-", dir=memory()) as root:
        try:
            return {"words": play_group(ranks, episode, Path(root) / "episode")}
        except Failed as error:
            return {"failure": str(error)}
        except Exception:
            return {"failure": traceback.format_exc()}


def memory() -> str:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def attempt(episode: Any) -> dict[str, Any]:
    """Plays it in a process of its own. Returns {"words"} or {"failure"}."""
    from episode import Failed, play

    parent = ROOT / "build" / "swarm" if episode.run.on_disk else memory()
    root = Path(tempfile.mkdtemp(prefix="holdfast-swarm-", dir=parent))
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_fd)
        os.setpgid(0, 0)
        try:
            answer: dict[str, Any] = {"words": play(episode, root / "episode").words}
        except Failed as error:
            answer = {"failure": str(error)}
        except BaseException:
            answer = {"failure": traceback.format_exc()}
        os.write(write_fd, json.dumps(answer).encode()[:60_000])
        os._exit(0)
    os.close(write_fd)
    signal.alarm(int(EPISODE_SECONDS))
    try:
        with os.fdopen(read_fd, "rb") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
    except (TimeoutError, KeyboardInterrupt) as error:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if isinstance(error, KeyboardInterrupt):
            raise
        text = json.dumps({"failure": "the episode hung"}).encode()
    finally:
        signal.alarm(0)
        subprocess.run(["rm", "-rf", str(root)], check=False)
    return json.loads(text) if text else {"failure": "the process of the episode died"}


def shrink(seed: int, without: list[str]) -> list[str]:
    """Names of what can be left out, and it fails still."""
    left_out = list(without)
    for name in simplifications():
        wanted = [*left_out, name]
        episode = of_seed(seed, wanted)
        if not episode.lives or episode == of_seed(seed, left_out):
            continue
        if any("failure" in attempt(episode) for _ in range(SHRINK_TRIES)):
            left_out = wanted
    return left_out


def report_failure(seed: int, without: list[str], failure: str, shrinks: bool) -> None:
    from draw import words

    smallest = shrink(seed, without) if shrinks and not is_group(seed) else without
    flag = f" --without {','.join(smallest)}" if smallest else ""
    print(f"\nFAILED, seed {seed}: {failure}\n")
    print(words(of_seed(seed, smallest)))
    print(f"\nto play it again: python tests/swarm/swarm.py --episodes 1 --seed {seed}{flag}\n", flush=True)


def timed_out(*_: Any) -> None:
    raise TimeoutError


def work(options: argparse.Namespace, job: int) -> tuple[int, list[int], Counter[str]]:
    """Plays every jobs-th episode until the time is over or `--episodes` are played."""
    import numpy.random  # noqa: F401
    import torch
    import torch._dynamo

    import defects
    import groups  # noqa: F401
    from group_runs import Ranks

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.plant:
        defects.DEFECTS[options.plant]()
    gc.collect()
    gc.freeze()  # what is here is left alone: forks share it
    signal.signal(signal.SIGALRM, timed_out)
    end = time.monotonic() + (options.seconds or 1e9)
    counts: Counter[str] = Counter()
    failed: list[int] = []
    played = 0
    ranks = None
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        for number in range(job, options.episodes or 1 << 60, options.jobs):
            if time.monotonic() > end or len(failed) >= options.failures:
                break
            seed = options.seed + number
            drawn = of_seed(seed, options.without, options.plant)
            if hasattr(drawn, "case"):
                if ranks is None:
                    ranks = stack.enter_context(Ranks())
                answer = attempt_group(ranks, drawn)
            else:
                answer = attempt(drawn)
            played += 1
            counts.update(set(options_of(drawn)) | set(answer.get("words", ())))
            if "failure" in answer:
                failed.append(seed)
                report_failure(seed, options.without, answer["failure"], options.shrink)
            if options.verbose:
                print(seed, answer.get("words"), flush=True)
    return played, failed, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long; default: until --episodes are played")
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="of the first episode; default: a fresh one")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--failures", type=int, default=3, help="a job stops after so many")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[])
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    parser.add_argument("--count", action="store_true", help="say how often each option and outcome was there")
    parser.add_argument("--plant", help="a defect of defects.py, in every life")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    prepare()
    if options.seed is None:
        options.seed = random.SystemRandom().getrandbits(40)
    print(f"swarm of seed {options.seed}", flush=True)
    started = time.monotonic()
    played, failed, counts = together(options)
    seconds = time.monotonic() - started
    if options.count:
        for name, count in sorted(counts.items()):
            print(f"{count:8} {name}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime
    print(
        f"{played} episodes in {seconds:.0f} s ({cpu_seconds:.0f} s of CPU), {len(failed)} failed"
        + (f": {failed}" if failed else "")
    )
    return 1 if failed or not played else 0


def together(options: argparse.Namespace) -> tuple[int, list[int], Counter[str]]:
    """All jobs, each in a process of its own."""
    played, failed, counts = 0, [], Counter[str]()
    pipes = []
    for job in range(options.jobs):
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_fd)
            answer = work(options, job)
            with os.fdopen(write_fd, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(write_fd)
        pipes.append((child, read_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the jobs take it, and say how far they came
    for child, read_fd in pipes:
        with os.fdopen(read_fd) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        if not text:
            failed.append(-1)
            continue
        of_job = json.loads(text)
        played += of_job[0]
        failed += of_job[1]
        counts.update(of_job[2])
    return played, failed, counts


if __name__ == "__main__":
    sys.exit(main())
