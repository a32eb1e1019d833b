"""How long a group is down when one of its ranks is killed: torchrun starts it again, and it goes on.

From the death of the rank to the end of the next step, by phases, as the ranks wrote them down. torchrun's own part (it
looks every so often, and waits for the others to end) and starting Python with its imports are told apart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scaleout.launch import RanksFailed, pool_directory, until

_FOLDER = Path(__file__).parents[1]


def measure_restart(
    num_ranks: int, *, steps_before: int = 40, shape: str = "rm1", medium: str = "memory"
) -> dict[str, Any]:
    """Seconds by phase. Kills the last rank once `steps_before` steps are trained."""
    with pool_directory(medium) as directory:
        events = directory / "events.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "scaleout.rank"]
        command += ["--shape", shape, "--pool", str(directory / "pool"), "--out", str(directory / "out.json")]
        command += ["--events", str(events), "--steps", str(10 * steps_before), "--warmup", "0", "--batches", "10"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        log = (directory / "log").open("w")
        process = subprocess.Popen(command, cwd=_FOLDER, env=environment, stdout=log, stderr=log)
        try:
            first = _await(events, process, "first step", after=0.0)
            time.sleep(2.0)
            victim = next(
                line for line in _read(events) if line["rank"] == num_ranks - 1 and line["event"] == "imported"
            )
            died = time.time()
            os.kill(victim["pid"], signal.SIGKILL)
            again = _await(events, process, "first step", after=died)
        except RanksFailed as error:
            raise RanksFailed(f"{error}\n{(directory / 'log').read_text()[-3000:]}") from None
        finally:
            process.terminate()
            process.wait(60)
            log.close()
        lines = [line for line in _read(events) if line["at"] > died and line["rank"] == 0]
        at = {line["event"]: line["at"] for line in lines}
        opened = next(line for line in lines if line["event"] == "opened")
        return {
            "ranks": num_ranks,
            "first_life_first_step": first["step"],
            "went_on_at": again["step"],
            "total": at["first step"] - died,
            "torchrun": lines[0]["started"] - died,
            "imports": at["imported"] - lines[0]["started"],
            "batches": max(0.0, at["met"] - at["imported"]),
            "opening": at["opened"] - at["met"],
            "opening_phases": opened["phases"],
            "first_step": at["first step"] - at["opened"],
        }


def _read(events: Path) -> list[dict[str, Any]]:
    if not events.exists():
        return []
    return [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]


def _await(events: Path, process: subprocess.Popen[bytes], event: str, *, after: float) -> dict[str, Any]:
    for _ in until(120):
        found = [line for line in _read(events) if line["event"] == event and line["at"] > after and line["rank"] == 0]
        if found:
            return found[0]
        if process.poll() is not None:
            raise RanksFailed(f"torchrun ended with status {process.returncode}")
    raise RanksFailed(f"no {event!r} in time")
