"""What a loader's state says of the stream that it is a position in: a plain mapping, as it may come from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.data.source import Source
from holdfast.errors import ConfigError

LoaderState = Mapping[str, int | str]

LANE_BATCH = "lane_batch_size"
ORIGIN = "origin"  # where the data of now begin; 0 where there is none
_FILES = "source.files"
_FILES_HINT = (
    ": a file of the data was edited, added, left out or put in another place. A position in the data means nothing in "
    "others: go on with those of before, or say that these are new, and follow them (train.new_data = true, "
    "Loader(new_data=True))"
)


def count(state: LoaderState, key: str, *, least: int = 0) -> int:
    """Raises ConfigError where there is none."""
    value = state.get(key)
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"loader state {key}: must be a count, not {value!r}")
    return value


def fingerprint_in(state: LoaderState, source: Source) -> Mapping[str, int | str]:
    """The source's fingerprint in the words of a state: those of now, or those of a ``former_fingerprint`` that the
    source has, where the state has them."""
    former: Mapping[str, int | str] = getattr(source, "former_fingerprint", {})
    told = {key: value for key, value in former.items() if state.get(f"source.{key}") == value}
    return {**source.fingerprint(), **told}


def check_stream(state: LoaderState, identity: LoaderState, positions: Iterable[str]) -> None:
    """Raises ConfigError, which names the field, where `state` is of another stream than the one that `identity` tells,
    or has what is neither of these nor of `positions`."""
    identity = {"lanes": 1, **identity} if "lanes" in state else identity
    for key, ours in identity.items():
        theirs = state.get(key, 1 if key == "lanes" else None)
        if theirs != ours:
            hint = _FILES_HINT if key == _FILES else ""
            raise ConfigError(f"loader state {key}: it was saved with {theirs!r}, but this loader has {ours!r}{hint}")
    if foreign := sorted(state.keys() - identity.keys() - {*positions, ORIGIN}):
        raise ConfigError(f"loader state {foreign[0]}: unknown to this loader; it was saved from other data")


def is_of_other_data(state: LoaderState, identity: LoaderState) -> bool:
    """Whether the data differ: in their files alone, where a source tells these apart from its columns."""
    of_source = {key for key in identity if key.startswith("source.")}
    differing = {key for key in of_source if state.get(key) != identity[key]}
    return differing == {_FILES} if _FILES in of_source else bool(differing)
