# Headers of others that many sources include are compiled once: phub_precompile(TARGET…) for what is
# optimized, phub_precompile_tests(TARGET…) with those of GoogleTest for tests, which are not. Headers of
# ours are not among them: they change. Only in the builds with sanitizers, which clang makes: in the
# release build every source includes all that it uses.
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
  # The compiled header holds paths of this build, so it is never taken from the cache, and what includes
  # it is cached by what went into it: compiler, flags, headers.
  set_target_properties(${owner} PROPERTIES CXX_COMPILER_LAUNCHER "")
  set(sum "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} ${PHUB_SANITIZE} ${PHUB_FUZZ}")
  string(APPEND sum " ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_DEBUG} ${phub_headers} ${arg_HEADERS}")
  foreach(header fmt/core.h fmt/format.h nlohmann/json.hpp gtest/gtest.h gmock/gmock.h)
    if(EXISTS /usr/include/${header})
      file(SHA256 /usr/include/${header} hash)
      string(APPEND sum " ${hash}")
    endif()
  endforeach()
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${owner}.dir/cmake_pch.hxx.pch.sum "${sum}")
endfunction()

if(PHUB_SANITIZE)
  # Without a time in it ccache knows the header again; programs and libraries share it with -fPIC.
  target_compile_options(phub_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-fPIC -Xclang -fno-pch-timestamp>")
  phub_precompiled_headers(phub_precompiled)
  phub_precompiled_headers(phub_precompiled_tests GTest::gtest GTest::gmock
    HEADERS <gmock/gmock.h> <gtest/gtest.h>)
  target_compile_options(phub_precompiled_tests PRIVATE -O0)
endif()

function(phub_precompile)
  if(PHUB_SANITIZE)
    foreach(target ${ARGN})
      target_precompile_headers(${target} REUSE_FROM phub_precompiled)
    endforeach()
  endif()
endfunction()

function(phub_precompile_tests)
  if(PHUB_SANITIZE)
    foreach(target ${ARGN})
      target_precompile_headers(${target} REUSE_FROM phub_precompiled_tests)
    endforeach()
  endif()
endfunction()
