"""docs/FORMAT.md and the core's headers say the same, both ways: no field, constant or enum value is in one alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from format_doc import CONSTANTS, ENUMS, LAYOUTS, MAGICS, REPOSITORY, TEXT, crc32c

CORE = REPOSITORY / "core"
HEADER = (CORE / "base/format.h").read_text()


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*", "", source)


def struct_fields(body: str) -> list[str]:
    return re.findall(r"^\s*[\w:]+\s+(\w+)(?:\[\w+\])?;", without_comments(body), re.MULTILINE)


STRUCTS = {
    found[1]: struct_fields(found[2])
    for found in re.finditer(r"^struct (\w+) \{\n(.*?)^\};", HEADER, re.MULTILINE | re.DOTALL)
}


def test_the_document_has_every_structure_and_every_field_of_the_header_and_no_other():
    assert {name: [f.name for f in layout.fields] for name, layout in LAYOUTS.items()} == STRUCTS
    assert len(STRUCTS) == 13


def test_the_documents_fields_follow_each_other_without_a_gap_and_fill_their_structure():
    for layout in LAYOUTS.values():
        end = 0
        for field in layout.fields:
            assert (layout.name, field.name, field.offset) == (layout.name, field.name, end)
            end += field.size
        assert (layout.name, end) == (layout.name, layout.size)


def declared_enums() -> dict[str, list[str]]:
    """The enums of the headers that the format uses, by name."""
    found = {}
    for header in ("base/format.h", "kernels/kernels.h", "step/plan.h"):
        source = without_comments((CORE / header).read_text())
        for enum in re.finditer(r"enum class (\w+) : std::uint32_t \{([^}]*)\}", source):
            found[enum[1]] = re.findall(r"(\w+) =", enum[2])
    return found


def test_the_document_has_every_constant_magic_and_enum_value_of_the_headers_and_no_other():
    declared = re.findall(r"inline constexpr \S+ (\w+)(\[\d\])? =", without_comments(HEADER))
    names = {name for name, _ in declared}
    assert {name.split("[")[0] for name in CONSTANTS} | set(MAGICS) == names
    assert {name for name in CONSTANTS if "[" in name} == {
        f"{name}[{i}]" for name, array in declared if array for i in range(int(array.strip("[]")))
    }
    assert {name: list(values) for name, values in ENUMS.items()} == declared_enums()


def program() -> str:
    """C++ that prints what the compiler knows, a name and a number a line."""
    lines = [
        f'put("{name}", sizeof({name}));'
        + "".join(
            f'put("{name}.{field}", offsetof({name}, {field})); put("{name}.{field} size", sizeof({name}::{field}));'
            for field in fields
        )
        for name, fields in STRUCTS.items()
    ]
    lines += [f'put("{name}", {name});' for name in (*CONSTANTS, *MAGICS)]
    lines += [
        f'put("{enum}::{value}", static_cast<std::uint64_t>({enum}::{value}));'
        for enum, values in ENUMS.items()
        for value in values
    ]
    return (
        '#include <cstdio>\n#include "base/format.h"\n#include "kernels/kernels.h"\n#include "step/plan.h"\n'
        "using namespace holdfast;\nusing namespace holdfast::format;\n"
        'void put(const char* name, std::uint64_t value) { std::printf("%s\\t%llu\\n", name, '
        "static_cast<unsigned long long>(value)); }\n"
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to ask")
def test_the_compiler_sees_the_documents_sizes_offsets_and_values(tmp_path: Path):
    source, binary = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(program())
    subprocess.run(["g++", "-std=c++20", f"-I{CORE}", str(source), "-o", str(binary)], check=True)
    printed = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in (line.split("\t") for line in printed.splitlines())}
    expected = {**CONSTANTS, **MAGICS}
    for layout in LAYOUTS.values():
        expected[layout.name] = layout.size
        for field in layout.fields:
            expected[f"{layout.name}.{field.name}"] = field.offset
            expected[f"{layout.name}.{field.name} size"] = field.size
    expected |= {f"{enum}::{name}": value for enum, values in ENUMS.items() for name, value in values.items()}
    assert found == expected


def test_every_version_up_to_todays_is_in_the_history():
    history = TEXT.split("## Version history")[1]
    versions = [int(version) for version in re.findall(r"^\| (\d+) \|", history, re.MULTILINE)]
    assert versions == list(range(1, CONSTANTS["version"] + 1))


def test_the_checksum_that_these_tests_use_is_crc_32c():
    assert crc32c(b"123456789") == 0xE3069283
