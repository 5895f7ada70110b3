# What `cmake --install` puts where, in the components that the packages are made of: server, worker
# (the library), dev (what is needed to build against it), bench.

# ---- The server, with its service and its options.
set(PHUB_CONFIG_DIR ${CMAKE_INSTALL_SYSCONFDIR}/phub CACHE STRING "Where phub.toml goes")
set(PHUB_UNIT_DIR lib/systemd/system CACHE STRING "Where the systemd unit goes")
cmake_path(ABSOLUTE_PATH PHUB_CONFIG_DIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX}
  OUTPUT_VARIABLE PHUB_CONFIG_FULL_DIR)
configure_file(${CMAKE_CURRENT_LIST_DIR}/phub.service.in packages/phub.service @ONLY)
install(TARGETS phub COMPONENT server)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/phub.toml DESTINATION ${PHUB_CONFIG_DIR} COMPONENT server)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/packages/phub.service DESTINATION ${PHUB_UNIT_DIR}
  COMPONENT server)

# ---- The library. Headers keep their folders: `#include "worker/worker.h"` here as there.
install(TARGETS phub_worker_shared EXPORT phub
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT worker NAMELINK_COMPONENT dev)

# The headers that phub.h, worker.h, control_client.h and those of the caches are made of.
set(phub_public_headers
  worker/phub.h worker/worker.h worker/data_shards.h worker/by_branch.h worker/device_keys.h worker/factors.h
  worker/geeps/cache.h worker/geeps/exchange.h worker/geeps/placement.h worker/geeps/key_queue.h
  worker/geeps/worker_exchange.h worker/geeps/standalone_exchange.h worker/geeps/device_group.h
  worker/device/device.h worker/device/host_device.h worker/device/cuda_device.h
  worker/device/arena.h worker/device/host_pages.h worker/device/kernel.h worker/iterstore/store.h
  kernels/encode.h kernels/fold.h kernels/kernels.h kernels/optimizers.def
  transport/control/control_client.h transport/error.h transport/control/http_client.h transport/control/interest.h transport/control/job_spec.h
  transport/control/calls.h transport/control/calls.def transport/control/choices.h transport/control/rules.h transport/text.h
  transport/fd.h transport/layout.h transport/memory_device.h transport/slot_format.h transport/control/branch_messages.h transport/control/loss_messages.h transport/control/messages.h transport/control/shard_messages.h
  transport/control/state_messages.h transport/tls/client_options.h
  transport/transport.h transport/verdict.h transport/wire.h)
foreach(header ${phub_public_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/phub/${folder} COMPONENT dev)
endforeach()

# To be linked statically: the library and what it needs of the other folders, as one archive.
set(archive ${CMAKE_CURRENT_BINARY_DIR}/packages/libphub_worker.a)
set(parts phub_iterstore_c phub_iterstore phub_geeps_c phub_geeps phub_device_keys phub_device phub_worker phub_transport phub_kernels phub_numa)
set(script "create ${archive}\n")
foreach(part ${parts})
  string(APPEND script "addlib $<TARGET_FILE:${part}>\n")
endforeach()
if(PHUB_CUDA AND CMAKE_CUDA_COMPILER)
  string(APPEND script "addlib ${CUDA_cudart_static_LIBRARY}\n")
endif()
file(GENERATE OUTPUT packages/archive.mri CONTENT "${script}save\nend\n")
add_custom_command(OUTPUT ${archive}
  COMMAND ${CMAKE_AR} -M < ${CMAKE_CURRENT_BINARY_DIR}/packages/archive.mri
  DEPENDS ${parts} ${CMAKE_CURRENT_BINARY_DIR}/packages/archive.mri
  VERBATIM)
add_custom_target(phub_archive ALL DEPENDS ${archive})
install(FILES ${archive} DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)

# find_package(phub), target phub::worker.
include(CMakePackageConfigHelpers)
set(cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/phub)
install(EXPORT phub NAMESPACE phub:: FILE phub-targets.cmake DESTINATION ${cmake_dir} COMPONENT dev)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/phub-config.cmake.in
  packages/phub-config.cmake INSTALL_DESTINATION ${cmake_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/packages/phub-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/packages/phub-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/packages/phub-config-version.cmake
  DESTINATION ${cmake_dir} COMPONENT dev)

# pkg-config phub; paths that move with the file.
set(phub_private_libs "-lhwy -lhwloc -lssl -lcrypto -ldl")
file(RELATIVE_PATH phub_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" phub_pc_prefix "${phub_pc_prefix}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/phub.pc.in packages/phub.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/packages/phub.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

# ---- The Python package (pyproject.toml): what it loads and runs, beside its modules.
install(FILES $<TARGET_FILE:phub_worker_shared> DESTINATION phub RENAME libphub_worker.so.0
  COMPONENT python EXCLUDE_FROM_ALL)
install(FILES worker/phub.h DESTINATION phub COMPONENT python EXCLUDE_FROM_ALL)
install(PROGRAMS $<TARGET_FILE:phub> DESTINATION phub/bin COMPONENT python EXCLUDE_FROM_ALL)
if(PHUB_BENCH)
  install(PROGRAMS $<TARGET_FILE:zerocompute> DESTINATION phub/bin COMPONENT python EXCLUDE_FROM_ALL)
endif()

# ---- The example, in C++ as a program and in Python as a text to begin with; benchmarks.
set(phub_programs_dir ${CMAKE_INSTALL_LIBEXECDIR}/phub)
install(TARGETS digits DESTINATION ${phub_programs_dir} COMPONENT bench)
install(FILES worker/examples/digits.py
  DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libphub-dev/examples COMPONENT dev)
if(PHUB_BENCH)
  install(TARGETS zerocompute COMPONENT bench)
  install(TARGETS kernels_bench DESTINATION ${phub_programs_dir} COMPONENT bench)
endif()
