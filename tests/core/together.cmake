# add_tests_together(PROGRAM NAME...): tests/core/NAME.cpp, all of them compiled as one file, for which their headers are
# read, and what they define is compiled, once. PROGRAM is the test by whose name it is called; each has a link. In each,
# `holdfast` is a namespace of its own that sees all of holdfast's names: so every header comes before the first of them, and
# what these headers name has to differ.
function(add_tests_together program)
  set(headers "")
  set(tests "")
  set(calls "")
  foreach(name IN LISTS ARGN)
    set(source ${CMAKE_CURRENT_SOURCE_DIR}/tests/core/${name}.cpp)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})  # it may come to include another header
    file(STRINGS ${source} included REGEX "^#include \"")
    list(APPEND headers ${included})
    string(APPEND tests "\nnamespace in_${name} { using namespace holdfast; }\n"
                        "#define holdfast in_${name}\n#define main main_of_${name}\n"
                        "#include \"${source}\"\n"
                        "#undef main\n#undef holdfast\n")
    string(APPEND calls "  if (name == \"${name}\") return called(main_of_${name}, argc, argv);\n")
    file(CREATE_LINK ${program} ${CMAKE_CURRENT_BINARY_DIR}/${name} SYMBOLIC)
  endforeach()
  list(REMOVE_DUPLICATES headers)
  list(JOIN headers "\n" headers)
  file(CONFIGURE OUTPUT ${program}.cpp @ONLY CONTENT [[
#include <cstdio>
#include <filesystem>
#include <type_traits>

@headers@
@tests@
template <class Main>
int called(Main* test, int argc, char** argv) {
  if constexpr (std::is_invocable_v<Main*, int, char**>) {
    return test(argc, argv);
  } else {
    return test();
  }
}

int main(int argc, char** argv) {
  const auto name = std::filesystem::path(argv[0]).filename();
@calls@
  std::fprintf(stderr, "%s: no such test\n", argv[0]);
  return 1;
}
]])
  add_executable(${program} ${CMAKE_CURRENT_BINARY_DIR}/${program}.cpp)
  target_include_directories(${program} PRIVATE tests/core)
endfunction()
