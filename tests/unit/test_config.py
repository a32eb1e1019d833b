"""A configuration is read strictly, and what is wrong with it is said in the words of the file."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.files.config import differences, read_config, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    kind: Literal["synthetic"] = "synthetic"
    num_samples: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    kind: Literal["parquet", "criteo"]
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    embedding_dim: int
    bottom: list[int]
    interaction: Literal["dot", "concat"] = "dot"
    size: tuple[int, int] = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    lr: float = 0.1
    steps: int | None = None
    shuffle: bool = True
    batch_size: int = 2048
    cache: int | Literal["auto"] = "auto"
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size = {self.batch_size}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    model: Model
    data: Synthetic | Files
    train: Train = Train()
    pool: Path | None = None


MINIMAL = 'name = "r"\nmodel = {embedding_dim = 16, bottom = [64, 16]}\ndata = {kind = "synthetic"}\n'


@pytest.fixture
def read(tmp_path):
    def read(text=MINIMAL, *overrides, cls=Run):
        file = tmp_path / "run.toml"
        file.write_text(text, encoding="utf-8")
        return read_config(cls, file, overrides)

    return read


@pytest.fixture
def problem(read):
    def problem(text=MINIMAL, *overrides, cls=Run):
        with pytest.raises(ConfigError) as caught:
            read(text, *overrides, cls=cls)
        return str(caught.value)

    return problem


def test_what_is_absent_keeps_its_default(read):
    assert read() == Run(name="r", model=Model(embedding_dim=16, bottom=[64, 16]), data=Synthetic())


def test_a_file_as_windows_editors_save_it_is_read(read):
    assert read("\ufeff" + MINIMAL.replace("\n", "\r\n")) == read()


def test_every_supported_type_is_read(read, tmp_path):
    text = MINIMAL.replace("synthetic", 'criteo", paths = ["day_0", "/abs/../day_1"], x = "')
    text = text.replace(', x = ""', "")
    text += 'pool = "../pool"\n[train]\nlr = 1\nsteps = 5\nshuffle = false\ncache = 7\nweights = {a = 1, "b.c" = inf}\n'
    config = read(text)
    assert config.data == Files(kind="criteo", paths=(tmp_path / "day_0", Path("/day_1")))
    assert config.pool == tmp_path.parent / "pool"
    assert config.train == Train(lr=1.0, steps=5, shuffle=False, cache=7, weights={"a": 1.0, "b.c": math.inf})
    assert type(config.train.lr) is float


def test_an_unknown_key_is_refused_with_the_nearest_valid_one(problem):
    assert problem(MINIMAL + "[train]\nbatchsize = 3").endswith(
        "run.toml: train.batchsize: unknown key; did you mean batch_size?"
    )
    assert "xyz: unknown key; there are name, model, data, train, pool" in problem(MINIMAL + "xyz = 1")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('train.lr = "fast"', 'train.lr: found "fast" (a string), expected a number'),
        ("train.batch_size = 1.0", "train.batch_size: found 1.0 (a number), expected an integer"),
        ("train.batch_size = true", "train.batch_size: found true (a boolean), expected an integer"),
        ("train.shuffle = 1", "train.shuffle: found 1 (an integer), expected true or false"),
        ("train.lr = 2020-01-01", "train.lr: found 2020-01-01 (a date or time), expected a number"),
        ("train = 3", "train: found 3 (an integer), expected a table (Train)"),
        ("train.weights = {a = 'x'}", 'train.weights.a: found "x" (a string), expected a number'),
        ("train.weights = {'b.c' = 'x'}", 'train.weights."b.c": found "x" (a string)'),
        ("train.cache = 'all'", 'train.cache: found "all" (a string), expected an integer or "auto"'),
        ("pool = ['x']", "pool: found an array of 1, expected a path (a string)"),
        ("pool = ''", "pool: the path is empty"),
        ("train.batch_size = 0", "train: batch_size = 0; it must be at least 1"),
    ],
)
def test_a_wrong_value_names_key_finding_and_expectation(problem, line, expected):
    assert f"run.toml: {expected}" in problem(MINIMAL + line)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("{bottom = [1]}", "missing: model.embedding_dim"),
        ("{embedding_dim = 1, bottom = [1, 'x']}", 'model.bottom[1]: found "x" (a string), expected an integer'),
        ("{embedding_dim = 1, bottom = 1}", "model.bottom: found 1 (an integer), expected an array"),
        ("{embedding_dim = 1, bottom = [], size = [1]}", "model.size: found an array of 1, expected an array of 2"),
        (
            "{embedding_dim = 1, bottom = [], interaction = 'concta'}",
            'model.interaction: found "concta" (a string), expected "dot" or "concat"; did you mean concat?',
        ),
    ],
)
def test_a_wrong_table_names_the_place_inside_it(problem, table, expected):
    text = MINIMAL.replace("{embedding_dim = 16, bottom = [64, 16]}", table)
    assert f"run.toml: {expected}" in problem(text)


def test_the_keys_missing_from_an_absent_table_are_named(problem):
    assert problem('name = "r"\ndata = {kind = "synthetic"}').endswith("missing: model.embedding_dim, model.bottom")
    assert problem("").endswith("model.embedding_dim, model.bottom")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("{}", 'data.kind: missing; it is "synthetic" or "parquet" or "criteo"'),
        ("{kind = 'syntetic'}", "did you mean synthetic?"),
        ("{kind = 'parquet'}", "missing: data.paths"),
        ("{kind = 'parquet', num_samples = 1}", "data.num_samples: unknown key"),
        ("{kind = 1}", "data.kind: found 1 (an integer)"),
    ],
)
def test_a_tagged_union_is_told_apart_by_its_kind(problem, table, expected):
    assert expected in problem(MINIMAL.replace('{kind = "synthetic"}', table))


def test_bad_toml_names_file_and_line(problem):
    message = problem("a = 1\nb = = 2\n")
    assert "run.toml: not TOML: " in message
    assert "line 2" in message


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        read_config(Run, tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(Run, tmp_path / "latin.toml")


def test_overrides_win_over_the_file_and_the_last_over_the_first(read, tmp_path, monkeypatch):
    monkeypatch.chdir("/usr")
    config = read(
        MINIMAL + "[train]\nlr = 5.0\n",
        *["train.lr=2", "train.lr = 0.25", "name=2020-01-01", "model.interaction=concat", "pool=x/y"],
        *["model.bottom=[32, 16]", 'train.weights."a.b"=2', "data={kind='synthetic', num_samples=7}"],
    )
    assert (config.train.lr, config.name, config.model.interaction) == (0.25, "2020-01-01", "concat")
    assert (config.pool, config.model.bottom) == (Path("/usr/x/y"), [32, 16])
    assert (config.train.weights, config.data) == ({"a.b": 2.0}, Synthetic(num_samples=7))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr", "not of the form"),
        ("=3", "not of the form"),
        ("name.x=3", "name is no table"),
        ("train.lrr=3", "train.lrr: unknown key; did you mean lr?"),
        ("train.lr=fast", 'train.lr: found "fast" (a string), expected a number'),
        ("model.bottom=[1", "the value is not TOML"),
    ],
)
def test_a_wrong_override_is_named_as_such(problem, override, expected):
    message = problem(MINIMAL, override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


def test_the_plain_form_is_json_and_tells_every_field(read):
    config = read(MINIMAL + "[train]\nlr = inf\n")
    plain = to_plain(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["train"]["lr"] == "inf"
    assert plain["model"] == {"embedding_dim": 16, "bottom": [64, 16], "interaction": "dot", "size": [1, 2]}


def test_differences_name_the_field_and_both_values(read):
    old = to_plain(read())
    changed = read(MINIMAL, "train.lr=0.2", "model.bottom=[16]", "data={kind='criteo', paths=[]}", "train.weights.a=1")
    assert differences(old, to_plain(changed)) == [
        "model.bottom: was [64, 16], is [16]",
        'data.kind: was "synthetic", is "criteo"',
        "data.num_samples: was 1000, is no more",
        "data.paths: was not there, is []",
        "train.lr: was 0.1, is 0.2",
        "train.weights.a: was not there, is 1.0",
    ]
    assert differences(old, old) == []
    assert differences({"a": 1}, {"a": True}) == ["a: was 1, is true"]


TRAINS = st.builds(
    Train,
    lr=st.floats(allow_nan=False),
    steps=st.none() | st.integers(-(2**63), 2**63 - 1),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 2**40),
    cache=st.integers(0, 9) | st.just("auto"),
    weights=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), st.floats(allow_nan=False), max_size=3),
)


def toml_value(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("Infinity", "inf").replace("\x7f", "\\u007f")


@given(TRAINS)
def test_what_is_written_as_toml_is_read_back_equal(tmp_path_factory, train):
    file = tmp_path_factory.getbasetemp() / "train.toml"
    fields = {f.name: getattr(train, f.name) for f in dataclasses.fields(train)}
    lines = [f"{name} = {toml_value(value)}" for name, value in fields.items() if value is not None]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert read_config(Train, file) == train


def test_a_field_that_no_file_can_say_is_a_bug_of_the_program(read):
    @dataclass(frozen=True, kw_only=True)
    class Strange:
        name: complex

    with pytest.raises(TypeError, match="name: a field of type"):
        read("name = 1", cls=Strange)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    directory: str | os.PathLike[str] | None = None


def test_a_path_of_an_object_that_scripts_make_too_is_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "place.toml").write_text('directory = "fast"\n')
    assert read_config(Place, tmp_path / "place.toml") == Place(directory=tmp_path / "fast")
    assert read_config(Place, tmp_path / "place.toml", ["directory=slow"]) == Place(directory=Path.cwd() / "slow")
    with pytest.raises(ConfigError, match=r"directory: found 3 .*expected a path"):
        read_config(Place, tmp_path / "place.toml", ["directory=3"])
