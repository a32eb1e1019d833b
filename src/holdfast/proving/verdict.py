"""What a proof found, in words: where runs part, in what, and what that points to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.proving.campaign import Proof
from holdfast.proving.comparison import Difference
from holdfast.proving.record import PARTS, KillKind

_LEAVES_A_PART = 3
_SUSPECTS = 6
_KILLS: dict[KillKind, str] = {
    "outside": "from outside",
    "persist": "where the core persists something",
    "opening": "while the pool was opened",
    "before commit": "before a commit",
    "after commit": "after a commit",
}


def verdict(proof: Proof) -> list[str]:
    """Lines for people."""
    if proof.failed_resume is not None:
        run, step, why = proof.failed_resume
        return [f"DOES NOT RESUME: run {run} was killed at or after step {step}, and its next process failed: {why}"]
    if proof.below_durable is not None:
        run, durable, resumed = proof.below_durable
        words = f"in run {run} step {durable} was durable, and after a kill it went on from step {resumed}"
        return [f"LOST A DURABLE STEP: {words}. That is holdfast's fault, whatever the script does: please report it"]
    if (difference := proof.earliest) is not None:
        return list(_differs(proof, difference))
    return list(_same(proof))


def report(proof: Proof) -> dict[str, Any]:
    """The same for programs."""
    difference = proof.earliest
    return {
        "version": 1,
        "same": proof.holds,
        "command": list(proof.plan.command),
        "seed": proof.plan.seed,
        "runs": len(proof.runs),
        "kills": proof.kills.total(),
        "kills_by_kind": dict(sorted(proof.kills.items())),
        "steps": proof.runs[0].last_step if proof.runs else 0,
        "digest": digest_of_all(proof),
        "facts": proof.facts,
        "difference": None if difference is None else _plain(difference),
        "verdict": verdict(proof),
    }


def digest_of_all(proof: Proof) -> str | None:
    """What `holdfast digest` says of every run's pool at its end; None where they differ."""
    digests = {run.end["digest"] for run in proof.runs if run.difference is None}
    return digests.pop() if len(digests) == 1 else None


def _same(proof: Proof) -> Iterator[str]:
    steps = proof.runs[0].last_step
    undisturbed = proof.plan.runs
    killed = len(proof.runs) - undisturbed
    kills = proof.kills
    words = ", ".join(f"{count} {_KILLS[kind]}" for kind, count in sorted(kills.items())) or "none was asked for"
    yield (
        f"SAME BITS: {_count(undisturbed, 'undisturbed run')} of {_count(steps, 'step')} and {killed} with "
        f"{_count(kills.total(), 'kill')} ({words}) "
        "have the same state after every step, and the same rows at the end"
    )
    if (digest := digest_of_all(proof)) is not None:
        yield f"digest {digest}"
    else:
        yield (
            "their digests differ in generators alone from which nothing was drawn: seed Python's random and NumPy, "
            "too, for one digest"
        )
    if steps < proof.plan.steps:
        yield f"the script ends by itself at step {steps}, before --steps {proof.plan.steps}"
    if kills.total() < proof.plan.kills:
        yield f"only {kills.total()} of {proof.plan.kills} kills hit before a run ended: prove more --steps"
    yield from (f"yet: {problem}" for problem in proof.facts.get("problems", ()))  # type: ignore[attr-defined]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _differs(proof: Proof, difference: Difference) -> Iterator[str]:
    if difference.resumed_at is None:
        yield (
            f"NOT DETERMINISTIC: run {difference.run} differs from run 1 at step {difference.step}, and no process was "
            "killed: the script does not compute the same twice, so no resume can be exact"
        )
    elif difference.loaded:
        yield (
            f"LOADED ANOTHER STATE: run {difference.run} was killed, and what its next process loaded is not the state "
            f"at the end of step {difference.step}"
        )
    else:
        yield (
            f"DIFFERS AFTER A RESUME: run {difference.run} was killed and went on from step {difference.resumed_at}; "
            f"its step {difference.step} differs from that of run 1. Runs that nobody kills are alike"
        )
    others = len(proof.differences) - 1
    if others:
        yield f"{others} more {'run differs' if others == 1 else 'runs differ'}, at this step or later"
    yield f"what differs first, at step {difference.step}:"
    for part in difference.parts:
        leaves = [leaf for leaf in difference.leaves if leaf.part == part]
        for leaf in leaves[:_LEAVES_A_PART]:
            yield f"  {part}: {leaf.name}: {leaf.words}"
        if len(leaves) > _LEAVES_A_PART:
            yield f"  {part}: {len(leaves) - _LEAVES_A_PART} more"
    same = [part for part in PARTS[:3] if part not in difference.parts]
    if same and not difference.loaded:
        yield f"  the same: {', '.join(same)}"
    yield from _causes(proof, difference)
    if difference.resumed_at is not None:
        yield f"the same kills again: --seed {proof.plan.seed} (those from outside hit where the machine lets them)"


def _causes(proof: Proof, difference: Difference) -> Iterator[str]:
    """What it points to, the likeliest first."""
    yield "what this points to:"
    if difference.outside:
        found = [f"  - {name}: {kind}" for name, kind in difference.outside[:_SUSPECTS]]
        if difference.resumed_at is None:
            yield "  variables of the script that differ between the runs, too:"
        else:
            yield "  variables of the script that are not in the Checkpoint, and differ there; those that decide what"
            yield "  comes next belong into it (as model, optimizer, scheduler, or in extra={...}):"
        yield from found
    yield from (f"  - {cause}" for cause in _known_causes(proof, difference))


def _known_causes(proof: Proof, difference: Difference) -> Iterator[str]:
    facts: Any = proof.facts
    parts = difference.parts
    yield from facts.get("problems", ())
    if facts.get("recovery") == "relaxed" and difference.resumed_at is not None:
        yield "the pool is opened with recovery='relaxed', which keeps newer rows beside older dense state: not exact"
    rates = [leaf for leaf in difference.leaves if ".lr" in leaf.name]
    if rates:
        yield (
            f"a learning rate differs ({rates[0].name}): is it computed from the clock, or from a count that starts "
            "anew in every process?"
        )
    if difference.resumed_at is not None:
        yield from _causes_after_resume(difference, parts)
        return
    if "batch" in parts or "cursor" in parts:
        yield (
            "other data: a shuffle, a sampler or negative samples without a seed, files listed in no order, or the "
            "order of a set or of hashes of texts"
            + ("" if facts.get("hash_seed") not in (None, "random") else " (PYTHONHASHSEED is not set)")
        )
    if difference.step == 0 and "parameters" in parts:
        yield "weights are initialised before a seed is set: call torch.manual_seed before the model is made"
    if "random numbers" in parts:
        yield "the global generators differ: a seed is missing, or how many numbers are drawn depends on something else"
    elif "batch" not in parts and not rates:
        yield (
            "something that no seed governs: a generator of the script's own without one, os.urandom, the clock, the "
            "order of a set"
            + ("" if facts.get("hash_seed") not in (None, "random") else " (PYTHONHASHSEED is not set)")
            + ", threads that race"
        )
    if facts.get("num_workers"):
        yield f"a DataLoader with {facts['num_workers']} workers: each needs its own seed (worker_init_fn, generator)"


def _causes_after_resume(difference: Difference, parts: list[str]) -> Iterator[str]:
    if difference.loaded:
        yield "load_state_dict of what is named above does not give back what state_dict gave"
        return
    if "batch" in parts or "cursor" in parts:
        yield (
            "the resumed process reads other data: give the Checkpoint the loader (state_dict, load_state_dict, "
            "samples, seek), and let it begin where it is told to"
        )
    elif "random numbers" in parts:
        yield (
            "random numbers are drawn between resume() and the first step: resume last, after everything is made; and "
            "give a DataLoader a generator of its own (generator=torch.Generator()), else it draws from torch's each "
            "time that it is iterated"
        )
    elif not difference.outside:
        yield "a state that no variable of the script shows: of a module, a library, or what a closure holds"
    if "plain values" in parts:
        yield "resume() puts no plain value of extra back: checkpoint.saved(name) gives it, for the script to do so"
    if "schedulers" in parts:
        yield "scheduler.step() comes after commit(): step it before, so that a commit has the whole of its step"


def _plain(difference: Difference) -> dict[str, Any]:
    return {
        "run": difference.run,
        "step": difference.step,
        "resumed_at": difference.resumed_at,
        "loaded": difference.loaded,
        "parts": difference.parts,
        "leaves": [{"part": leaf.part, "name": leaf.name, "words": leaf.words} for leaf in difference.leaves],
        "outside": [{"name": name, "kind": kind} for name, kind in difference.outside],
    }
