"""Tables as users declare them, with TorchRec's field names, and as the pool numbers them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast import _core
from holdfast.data.source import DEFAULT_CAPACITY, Feature
from holdfast.errors import ConfigError

DTYPES = ("fp32", "fp16", "bf16")
TORCH_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POOLINGS = ("sum", "mean")
KEYS = ("none", "int64")  # in the order of the pool's format (core/base/format.h, KeyKind)
MAX_CAPACITY = (1 << 32) - 2  # of a table with keys
MAX_ROWS = 1 << 40
STAY_LEVELS = 24  # 2^i updates and more, up to the next power of two (core/keys/key_policy.h)
MAX_STAY = 1 << 24
ADMISSION_CHANCES = 16  # occurrences of a key that have a chance of their own (core/keys/key_admission.h)
_NEVER = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBagConfig:
    """One table. TorchRec's own ``EmbeddingBagConfig`` is taken as well, wherever this one is.

    num_embeddings: rows; ids are their numbers. None: ids are keys, any 64 bits (``keys="int64"``), that nobody has to
        count. A key gets a row when a batch to train brings it first, and its record is part of the step that trains
        it; what has no row reads as its initial value. No two keys ever share a row.
    capacity: rows that a table with keys can have; a key for which there is none left is PoolFull. Files are sparse:
        what is not used takes no room. Default: 2^26.
    ttl_steps, max_keys: of a table with keys. A key that no step updated for more than ttl_steps steps is
        left behind, and so are, where there would be more than max_keys, those that were updated longest ago: all of a
        step at a time, never those of the newest one. Which are is a function of the committed steps. What is left
        behind reads as its initial value and begins anew if it comes again; its row is another key's some time later,
        at 32 steps at the earliest, so capacity has to be the larger by what comes in so many steps, and by an eighth.
    stay: how many steps longer a key stays that was updated often, as if its newest update had been so much later. A
        function of its updates, called for 1, 2, 4, 8 and so on, once, when the pool is made, and kept in it; a key in
        between has the steps of the power of two before. They must not fall. Or these numbers, as many as there are;
        or "lfu", least frequently used, with age: as many steps as the key had updates when they last came to a power
        of two, less one. "lru", the default: none. Where keys that were updated often are more than max_keys by
        themselves, those with the least that fit stay together, so there may be some more; and keys of the newest
        step stay beside them.
    admit_after: the step that brings a key for the `admit_after`-th time is the first that trains it; until then it
        counts, and reads as its initial value.
    admit_probability: each step that brings a key admits it with this chance: that step is the first that trains it.
        With admit_after, each step from the `admit_after`-th on. Which steps do is drawn from the pool's seed, the
        table and the key, so it is the same in every life, on any number of ranks, and if the key begins anew.
    admit: in place of admit_probability, the chance as a function of how often the key came, this time included:
        called for 1 to 16, once, when the pool is made, and kept in it; the last chance, above 0, is that of all that
        follow. Or those chances, as many as there are.
    weight_init_min, weight_init_max: rows start uniform in [min, max); default ±1/sqrt(num_embeddings), as TorchRec's
        (with keys: of the capacity). The initial value of a row is a function of (pool seed, table, row), with keys of
        (pool seed, table, key), so a table costs nothing until rows are used.
    """

    num_embeddings: int | None
    embedding_dim: int
    name: str
    feature_names: Sequence[str]
    data_type: str = "fp32"
    pooling: str = "sum"
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    keys: str | None = None
    capacity: int | None = None
    ttl_steps: int | None = None
    max_keys: int | None = None
    stay: Callable[[int], int] | Sequence[int] | str | None = None
    admit_after: int | None = None
    admit_probability: float | None = None
    admit: Callable[[int], float] | Sequence[float] | None = None

    @property
    def num_rows(self) -> int:
        """Of a table that was normalized: the rows that it has, or can have."""
        rows = self.num_embeddings if self.keys is None else self.capacity
        assert rows is not None
        return rows


def normalize(table: Any) -> EmbeddingBagConfig:
    """Any object with TorchRec's field names as our own, checked.

    Raises ConfigError that names table and field.
    """
    name = _name_of(table)

    def bad(field: str, found: object, wanted: str) -> ConfigError:
        return ConfigError(f"table '{name}': {field} = {found!r}; it must be {wanted}")

    def choice(field: str, default: str, choices: Sequence[str]) -> str:
        value = getattr(table, field, None)
        word = str(getattr(value, "value", default if value is None else value)).lower()
        if word not in choices:
            raise bad(field, word, " or ".join(choices))
        return word

    embedding_dim = _whole("embedding_dim", table.embedding_dim, bad)
    num_rows, keys = _rows_of(table, bad)
    if not 1 <= embedding_dim <= 4096:
        raise bad("embedding_dim", embedding_dim, "between 1 and 4096")
    if isinstance(table.feature_names, str):  # whose letters would be features
        raise bad("feature_names", table.feature_names, "a list of names")
    features = [str(feature) for feature in table.feature_names]
    if not features:
        raise bad("feature_names", [], "the names of the features that read this table")
    low, high = getattr(table, "weight_init_min", None), getattr(table, "weight_init_max", None)
    init_fn = getattr(table, "init_fn", None)
    if isinstance(init_fn, functools.partial) and init_fn.func is torch.nn.init.uniform_ and not init_fn.args:
        # What TorchRec makes of its own weight_init_min and _max.
        low, high = init_fn.keywords.get("a", 0.0), init_fn.keywords.get("b", 1.0)
    elif init_fn is not None:
        raise bad("init_fn", "a function", "None: rows are initialised on first use, set weight_init_min and _max")
    bound = 1.0 / math.sqrt(num_rows)
    low, high = -bound if low is None else float(low), bound if high is None else float(high)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise bad("weight_init_min, weight_init_max", (low, high), "finite and in order")
    data_type = choice("data_type", "fp32", DTYPES)
    if not _can_begin_within(low, high, TORCH_DTYPES[DTYPES.index(data_type)]):
        raise bad("weight_init_min, weight_init_max", (low, high), f"within what {data_type} has")
    return EmbeddingBagConfig(
        num_embeddings=num_rows if keys is None else None,
        embedding_dim=embedding_dim,
        name=name,
        feature_names=features,
        data_type=data_type,
        pooling=choice("pooling", "sum", POOLINGS),
        weight_init_min=low,
        weight_init_max=high,
        keys=keys,
        capacity=None if keys is None else num_rows,
        **_policy_of(table, keys, num_rows, bad),
    )


def _name_of(table: Any) -> str:
    if isinstance(table, Mapping):  # whose methods have names of fields: keys
        raise ConfigError(f"a table is a {type(table).__name__}; make an EmbeddingBagConfig of it, with (**table)")
    name = str(getattr(table, "name", "") or "")
    if not name:
        raise ConfigError("a table has no name: every table needs one, it is how its rows are found again")
    return name


def _whole(field: str, value: Any, bad: Callable[[str, object, str], ConfigError]) -> int:
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        raise bad(field, value, "a whole number") from None
    if whole != value:
        raise bad(field, value, "a whole number")
    return whole


def _can_begin_within(low: float, high: float, dtype: torch.dtype) -> bool:
    """Whether rows that are drawn from [low, high), in float32, are finite in their dtype."""
    drawn = torch.tensor([low, high, high - low], dtype=torch.float32, device="cpu")
    return bool(drawn.isfinite().all()) and bool(drawn[:2].to(dtype).isfinite().all())


def _rows_of(table: Any, bad: Callable[[str, object, str], ConfigError]) -> tuple[int, str | None]:
    """How many rows the table has, or can have, and its kind of keys."""
    keys, capacity = getattr(table, "keys", None), getattr(table, "capacity", None)
    if table.num_embeddings is None or keys is not None:
        if table.num_embeddings is not None:
            raise bad("num_embeddings", table.num_embeddings, "None where there are keys: capacity limits their rows")
        keys = "int64" if keys is None else keys
        if keys not in KEYS[1:]:
            raise bad("keys", keys, " or ".join(repr(kind) for kind in KEYS[1:]))
        num_rows = DEFAULT_CAPACITY if capacity is None else _whole("capacity", capacity, bad)
        if not 1 <= num_rows <= MAX_CAPACITY:
            raise bad("capacity", capacity, "between 1 and 2^32 - 2")
        return num_rows, keys
    if capacity is not None:
        raise bad("capacity", capacity, "None where num_embeddings says how many rows there are")
    num_rows = _whole("num_embeddings", table.num_embeddings, bad)
    if not 1 <= num_rows <= MAX_ROWS:
        raise bad("num_embeddings", num_rows, "between 1 and 2^40")
    return num_rows, None


def _policy_of(
    table: Any, keys: str | None, num_rows: int, bad: Callable[[str, object, str], ConfigError]
) -> dict[str, Any]:
    """Which keys keep their rows."""
    most = {"ttl_steps": 1 << 31, "max_keys": num_rows, "admit_after": 1 << 31}
    policy: dict[str, Any] = {}
    for name, largest in most.items():
        value = policy[name] = getattr(table, name, None)
        if value is None:
            continue
        if keys is None:
            raise bad(name, value, "None where there are no keys")
        policy[name] = _whole(name, value, bad)
        if not 1 <= value <= largest:
            raise bad(name, value, f"between 1 and {largest}")
    policy["admit"] = _chances_of(table, keys, bad)
    policy["stay"] = _stay_of(table, keys, bad)
    return policy


def _stay_of(table: Any, keys: str | None, bad: Callable[[str, object, str], ConfigError]) -> tuple[int, ...] | None:
    """How many steps a key stays longer, of each level of updates."""
    stay = getattr(table, "stay", None)
    if stay is None:
        return None
    if keys is None:
        raise bad("stay", stay, "None where there are no keys")
    if not getattr(table, "ttl_steps", None) and not getattr(table, "max_keys", None):
        raise bad("stay", stay, "None where neither ttl_steps nor max_keys leaves keys behind")
    if isinstance(stay, str):
        if stay not in ("lru", "lfu"):
            raise bad("stay", stay, "'lru', 'lfu', or a function of the number of updates")
        steps = [(1 << level) - 1 if stay == "lfu" else 0 for level in range(STAY_LEVELS)]
    else:
        steps = _answers(stay, [1 << level for level in range(STAY_LEVELS)])
    is_good = all(int(of_level) == of_level and 0 <= of_level <= MAX_STAY for of_level in steps)
    if not steps or not is_good or steps != sorted(steps):
        raise bad("stay", steps, f"whole numbers from 0 to {MAX_STAY} that do not fall with the number of updates")
    return tuple(int(of_level) for of_level in steps)


def _chances_of(
    table: Any, keys: str | None, bad: Callable[[str, object, str], ConfigError]
) -> tuple[float, ...] | None:
    """Of a key's occurrences to admit it, or None where each does that comes late enough."""
    probability, admit = getattr(table, "admit_probability", None), getattr(table, "admit", None)
    for name, value in (("admit_probability", probability), ("admit", admit)):
        if value is not None and keys is None:
            raise bad(name, value, "None where there are no keys")
    if probability is not None:
        if admit is not None:
            raise bad("admit_probability", probability, "None where there is admit, which says all of it")
        if not 0 < probability <= 1:
            raise bad("admit_probability", probability, "above 0, and 1 at most")
        return (float(probability),) * ADMISSION_CHANCES
    if admit is None:
        return None
    chances = [float(chance) for chance in _answers(admit, range(1, ADMISSION_CHANCES + 1))]
    if not chances or not all(0 <= chance <= 1 for chance in chances) or not chances[-1]:
        raise bad("admit", chances, "chances from 0 to 1, the last one above 0")
    return tuple(chances)


def _answers(rule: Callable[[int], Any] | Iterable[Any], asked: Sequence[int]) -> list[Any]:
    """What a function says to each; of answers that are given the last holds on."""
    if callable(rule):
        return [rule(number) for number in asked]
    given = list(rule)[: len(asked)]
    return given + given[-1:] * (len(asked) - len(given))


def _steps_to_stay(stay: Callable[[int], int] | Sequence[int] | str | None) -> list[int]:
    """As the pool keeps them."""
    if stay is None:
        return []
    assert not callable(stay), "of a table that was normalized"
    assert not isinstance(stay, str), "of a table that was normalized"
    return list(stay) if any(stay) else []


def _turned_away(chances: Callable[[int], float] | Sequence[float] | None) -> list[int]:
    """As the pool keeps chances to be admitted: those that are left, in units of 2^-32."""
    if chances is None:
        return []
    assert not callable(chances), "of a table that was normalized"
    left = [(1 << 32) - round(chance * (1 << 32)) for chance in chances]  # exact, but for the rounding
    found = [min(of_one, _NEVER - 1) if chance else _NEVER for of_one, chance in zip(left, chances, strict=True)]
    return found if any(found) else []


def _admits(turned_away: Sequence[int]) -> str:
    """The other way, for messages."""
    chances = [0.0 if of_one == _NEVER else 1 - of_one / (1 << 32) for of_one in turned_away]
    while len(chances) > 1 and chances[-1] == chances[-2]:
        chances.pop()
    return str([float(f"{chance:.6g}") for chance in chances or [1.0]])


def normalize_all(tables: Iterable[Any]) -> list[EmbeddingBagConfig]:
    """All of them; also refuses a table name or a feature that is there twice."""
    configs = [normalize(table) for table in tables]
    if not configs:
        raise ConfigError("no tables are given")
    names = [config.name for config in configs]
    features = [feature for config in configs for feature in config.feature_names]
    for what, found, remedy in (
        ("table", names, "rows are found again by it: give each a name of its own"),
        ("feature", features, "one table reads it: give the other a name of its own for the same ids, or a collection"),
    ):
        doubles = sorted({item for item in found if found.count(item) > 1})
        if doubles:
            raise ConfigError(f"{what} {doubles[0]!r} is declared more than once; {remedy}")
    return configs


def features_of(tables: Sequence[EmbeddingBagConfig]) -> list[tuple[str, int]]:
    """The features of all tables in the order of a collection's output, each with the place of its table."""
    return [(feature, t) for t, table in enumerate(tables) for feature in table.feature_names]


def to_spec(config: EmbeddingBagConfig, optimizer: int) -> _core.TableSpec:
    assert config.weight_init_min is not None and config.weight_init_max is not None
    return _core.TableSpec(
        name=config.name,
        num_embeddings=config.num_rows,
        embedding_dim=config.embedding_dim,
        dtype=DTYPES.index(config.data_type),
        optimizer=optimizer,
        pooling=POOLINGS.index(config.pooling),
        init_low=config.weight_init_min,
        init_high=config.weight_init_max,
        keys=0 if config.keys is None else KEYS.index(config.keys),
        ttl_steps=config.ttl_steps or 0,
        max_keys=config.max_keys or 0,
        admit_after=config.admit_after or 0,
        turned_away=_turned_away(config.admit),
        stay=_steps_to_stay(config.stay),
    )


_IMPORT = "make a new pool of what was learnt (holdfast export, then import)"
_REMEDIES = {
    "num_embeddings": "give the table more rows (holdfast snapshot, then restore --rows)",
    "optimizer": _IMPORT,
    "dtype": _IMPORT,
}

FIELDS = (
    *("keys", "num_embeddings", "embedding_dim", "dtype", "optimizer", "pooling", "init_low", "init_high"),
    *("ttl_steps", "max_keys", "admit_after", "turned_away", "stay"),
)  # that a table keeps for good


def in_words(spec: _core.TableSpec, field: str, optimizers: Sequence[str]) -> Any:
    """One of FIELDS, as whoever makes the table says it."""
    value = getattr(spec, field)
    if field == "turned_away":
        return _admits(value)
    words = {"dtype": DTYPES, "pooling": POOLINGS, "optimizer": optimizers, "keys": KEYS}
    return words[field][value] if field in words else value


def check_same(there: _core.TableSpec, wanted: _core.TableSpec, optimizers: Sequence[str]) -> None:
    """Raises ConfigError that names the field in which a pool's table differs from the one that is asked for."""
    names = {"num_embeddings": "capacity"} if there.keys and wanted.keys else {}
    names["turned_away"] = "chances to be admitted"
    for field in FIELDS:
        old, new = in_words(there, field, optimizers), in_words(wanted, field, optimizers)
        if field.startswith("init_") and _is_default(new, wanted.num_embeddings) and _is_default(old):
            continue  # of another number of rows, before a restore gave the table more: rows begin as they did
        if old != new:
            raise ConfigError(
                f"table '{there.name}': the pool was made with {names.get(field, field)} = {old}, now it is {new}; "
                f"go back to the old value, or {_REMEDIES.get(field, 'start a new pool')}"
            )


def _is_default(bound: float, num_rows: int | None = None) -> bool:
    """Whether rows of a table with so many, or with any number of them, begin within that where nothing is said."""
    if num_rows is None:
        num_rows = round(1.0 / bound**2) if bound else 0
    return num_rows > 0 and np.float32(abs(bound)) == np.float32(1.0 / math.sqrt(num_rows))


def refuse_keys(tables: Iterable[EmbeddingBagConfig | _core.TableSpec | Feature], where: str) -> None:
    """Raises ConfigError for a table with keys; where: what cannot have one yet."""
    for table in tables:
        if table.keys:
            raise ConfigError(
                f"table '{table.name}' has keys, which {where} cannot have yet; give the table num_embeddings, and ids "
                "below it"
            )


def find_tables(
    there: Sequence[_core.TableSpec], wanted: Sequence[_core.TableSpec], optimizers: Sequence[str], where: str
) -> list[int]:
    """Where the wanted tables are among those of a pool. Raises ConfigError for one that is not there or differs."""
    numbers = {table.name: number for number, table in enumerate(there)}
    for spec in wanted:
        if spec.name not in numbers:
            raise ConfigError(
                f"{where} has no table '{spec.name}' (it has {', '.join(numbers)}); "
                "a pool's tables are fixed when it is made"
            )
        check_same(there[numbers[spec.name]], spec, optimizers)
    return [numbers[spec.name] for spec in wanted]
