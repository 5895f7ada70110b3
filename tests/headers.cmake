# The target `headers` compiles every header alone. (Not the "-inl.h" ones: those are parts of a
# source that is compiled once per instruction set.)
file(GLOB_RECURSE headers RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/kernels/*.h ${CMAKE_SOURCE_DIR}/numa/*.h ${CMAKE_SOURCE_DIR}/transport/*.h
  ${CMAKE_SOURCE_DIR}/phub/*.h ${CMAKE_SOURCE_DIR}/worker/*.h ${CMAKE_SOURCE_DIR}/bench/*.h
  ${CMAKE_SOURCE_DIR}/tests/*.h)
list(FILTER headers EXCLUDE REGEX "-inl\\.h$")
set(sources "")
foreach(header ${headers})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/headers/${header}.cc)
  # Twice: a header without a guard fails too.
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
  list(APPEND sources ${source})
endforeach()
add_library(headers OBJECT EXCLUDE_FROM_ALL ${sources})
target_compile_options(headers PRIVATE -O0)
target_link_libraries(headers PRIVATE phub_options phub_transport phub_kernels phub_digits
  spdlog::spdlog CLI11::CLI11 tomlplusplus::tomlplusplus PkgConfig::HWLOC hwy::hwy
  $<TARGET_NAME_IF_EXISTS:benchmark::benchmark> GTest::gtest GTest::gmock)
