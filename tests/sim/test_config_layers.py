"""Files in layers: the later one's word counts, tables are merged, and messages name the last file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.files.config import read_config, read_layers, read_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    size: int = 1
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    title: str
    part: Part = Part()
    parts: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.part.size > 10:
            raise ValueError(f"part.size = {self.part.size}; it must be 10 at most")


@pytest.fixture
def layers(tmp_path: Path):
    def layers(*texts: str, overrides: tuple[str, ...] = ()) -> Whole:
        paths = [tmp_path / f"layer{number}.toml" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return read_layers(Whole, paths, overrides)

    return layers


def test_the_later_file_counts_where_both_have_a_key(layers):
    assert layers('title = "low"', 'title = "high"').title == "high"
    assert layers('title = "a"', 'title = "b"', 'title = "c"').title == "c"


def test_what_only_one_of_them_says_is_kept_from_either(layers):
    found = layers('title = "low"\n[part]\nsize = 3', '[part]\nnames = ["x"]')
    assert found == Whole(title="low", part=Part(size=3, names=("x",)))


def test_tables_within_tables_are_merged_and_keep_the_order_of_the_first(layers):
    low = 'title = "t"\n[parts.b]\nsize = 2\n[parts.a]\nsize = 3'
    found = layers(low, '[parts.c]\nsize = 4\n[parts.a]\nnames = ["y"]')
    assert list(found.parts) == ["b", "a", "c"]
    assert found.parts["a"] == Part(size=3, names=("y",))


def test_arrays_are_replaced_whole(layers):
    low = 'title = "t"\n[part]\nnames = ["one", "two"]'
    assert layers(low, '[part]\nnames = ["three"]').part.names == ("three",)
    assert layers(low, "[part]\nnames = []").part.names == ()


def test_a_table_over_a_value_and_a_value_over_a_table_are_judged_by_their_type(layers):
    with pytest.raises(ConfigError, match=r"layer1\.toml: title: found a table, expected a string"):
        layers('title = "t"', "[title]\nx = 1")
    with pytest.raises(ConfigError, match=r"layer1\.toml: part: found 3 \(an integer\), expected a table \(Part\)"):
        layers('title = "t"\n[part]\nsize = 1', "part = 3")


def test_a_mistake_in_any_layer_is_told_with_its_file_and_key(layers):
    low = 'title = "t"\n[part]\nsise = 1'
    with pytest.raises(ConfigError, match=r"layer0\.toml: part\.sise: unknown key; did you mean size\?"):
        layers(low, '[part]\nnames = ["x"]')


def test_the_dataclass_judges_the_merged_values_once(layers):
    assert layers('title = "t"\n[part]\nsize = 20', "[part]\nsize = 5").part.size == 5
    with pytest.raises(ConfigError, match=r"layer1\.toml: part\.size = 20; it must be 10 at most"):
        layers('title = "t"\n[part]\nsize = 5', "[part]\nsize = 20")


def test_bad_toml_is_told_with_the_file_that_it_is_in(layers):
    with pytest.raises(ConfigError, match=r"layer0\.toml: not TOML: .*line 2"):
        layers('title = "t"\nx =\n', 'title = "t"')


def test_a_layer_that_cannot_be_read_is_named(tmp_path):
    above = tmp_path / "above.toml"
    above.write_text('title = "t"')
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        read_layers(Whole, [tmp_path / "missing.toml", above])


def test_overrides_win_over_all_layers_and_leave_no_trace_in_the_next_reading(layers):
    low = 'title = "t"\n[part]\nsize = 3'
    assert layers(low, "", overrides=("part.size=4",)).part.size == 4
    assert layers(low, "").part.size == 3
    with pytest.raises(ConfigError, match=r"override 'part\.size=x': part\.size: found \"x\""):
        layers(low, "", overrides=("part.size=x",))


def test_one_layer_is_a_file_as_ever(tmp_path):
    path = tmp_path / "only.toml"
    path.write_text('title = "t"\n[part]\nsize = 7')
    assert read_layers(Whole, [path]) == read_config(Whole, path) == Whole(title="t", part=Part(size=7))


@pytest.mark.parametrize(
    ("hint", "value", "read"),
    [(float, 3, 3.0), (int, 3, 3), (tuple[str, ...], ["x"], ("x",)), (float | None, 2, 2.0), (bool, True, True)],
)
def test_a_single_value_is_read_as_one_in_a_file(hint, value, read):
    found = read_value(hint, value, "part.size")
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(("hint", "value"), [(float, "fast"), (int, 3.5), (bool, "false"), (tuple[str, ...], "x")])
def test_a_single_value_of_another_type_is_refused_by_its_name(hint, value):
    with pytest.raises(ConfigError, match=r"^part\.size: found "):
        read_value(hint, value, "part.size")
