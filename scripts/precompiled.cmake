# Compiles headers of other projects once: phub_precompile(TARGET…) for what is optimized,
# phub_precompile_tests(TARGET…), with those of GoogleTest, for tests, which are not. Our own headers are not
# among them, because they change. With PHUB_PRECOMPILE=OFF every source has to include all that it uses;
# scripts/tidy compiles so.
option(PHUB_PRECOMPILE "Precompile the headers of other projects" ON)
set(phub_headers
  <algorithm> <array> <atomic> <bit> <chrono> <cmath> <condition_variable> <cstdint> <cstring>
  <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <random> <set> <span> <sstream>
  <stdexcept> <string> <string_view> <thread> <tuple> <unordered_map> <utility> <variant> <vector>
  <fmt/format.h> <nlohmann/json.hpp>)

# phub_precompiled_headers(OWNER LIBRARIES… [HEADERS HEADER…]): what others reuse.
function(phub_precompiled_headers owner)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEADERS")
  file(CONFIGURE OUTPUT precompiled.cc CONTENT "")
  add_library(${owner} OBJECT ${CMAKE_BINARY_DIR}/precompiled.cc)
  target_link_libraries(${owner} PRIVATE phub_options fmt::fmt nlohmann_json::nlohmann_json
    ${arg_UNPARSED_ARGUMENTS})
  target_precompile_headers(${owner} PRIVATE ${phub_headers} ${arg_HEADERS})
  # The compiled header holds paths of this build, so it is never taken from the cache. What includes it
  # is cached by what went into it: compiler, flags, headers.
  set_target_properties(${owner} PROPERTIES CXX_COMPILER_LAUNCHER "")
  set(sum "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} ${PHUB_SANITIZE}")
  string(TOUPPER "CMAKE_CXX_FLAGS_${CMAKE_BUILD_TYPE}" type_flags)
  string(APPEND sum " ${CMAKE_CXX_FLAGS} ${${type_flags}} ${phub_headers} ${arg_HEADERS}")
  foreach(header fmt/core.h fmt/format.h nlohmann/json.hpp gtest/gtest.h gmock/gmock.h)
    if(EXISTS /usr/include/${header})
      file(SHA256 /usr/include/${header} hash)
      string(APPEND sum " ${hash}")
    endif()
  endforeach()
  foreach(extension pch gch)  # clang's, g++'s
    file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${owner}.dir/cmake_pch.hxx.${extension}.sum "${sum}")
  endforeach()
endfunction()

if(PHUB_PRECOMPILE)
  # Programs and libraries share the header, with -fPIC. ccache recognizes it when it holds no time (clang),
  # and when the preprocessor's output names it (g++).
  target_compile_options(phub_options INTERFACE
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-fPIC -Xclang -fno-pch-timestamp>"
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:-fPIC -fpch-preprocess>")
  phub_precompiled_headers(phub_precompiled)
  if(PHUB_TESTS)
    phub_precompiled_headers(phub_precompiled_tests GTest::gtest GTest::gmock
      HEADERS <gmock/gmock.h> <gtest/gtest.h>)
    target_compile_options(phub_precompiled_tests PRIVATE -O0)
    # Of the release build only some tests are compiled.
    set_target_properties(phub_precompiled_tests PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endif()

function(phub_precompile)
  if(PHUB_PRECOMPILE)
    foreach(target ${ARGN})
      target_precompile_headers(${target} REUSE_FROM phub_precompiled)
    endforeach()
  endif()
endfunction()

# phub_cold(TARGET SOURCE…): sources of the target that gradients do not pass: options, pages, what is said over HTTP.
# They would take most of the compiler's time, and are hardly optimized.
function(phub_cold target)
  set(cold ${target}_cold)
  add_library(${cold} OBJECT ${ARGN})
  target_link_libraries(${cold} PRIVATE $<TARGET_PROPERTY:${target},LINK_LIBRARIES>)
  target_compile_definitions(${cold} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${cold}>)
  if(PHUB_SANITIZE)
    target_compile_options(${cold} PRIVATE -O0)
  else()
    target_compile_options(${cold} PRIVATE -Og)
    phub_precompile(${cold})
  endif()
endfunction()

function(phub_precompile_tests)
  if(PHUB_PRECOMPILE)
    foreach(target ${ARGN})
      target_precompile_headers(${target} REUSE_FROM phub_precompiled_tests)
    endforeach()
  endif()
endfunction()
