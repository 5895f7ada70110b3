# What `cpack -G DEB` makes, in a build whose prefix is /usr (scripts/packages/build is one):
#   phub-server, libphub-worker0, libphub-dev, phub-bench
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME phub)
set(CPACK_PACKAGE_VENDOR phub)
set(CPACK_PACKAGE_CONTACT "phub maintainers <maintainers@phub.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "gradient aggregation for data-parallel training")
set(CPACK_STRIP_FILES ON)
# /etc and /lib/systemd are outside the prefix.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX ${CMAKE_INSTALL_PREFIX})
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL server worker dev bench)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(packages_dir ${CMAKE_CURRENT_BINARY_DIR}/packages)

set(CPACK_DEBIAN_SERVER_PACKAGE_NAME phub-server)
set(CPACK_COMPONENT_SERVER_DESCRIPTION "Workers push the gradient of every key of a model; the server adds them up in
the order of the ranks, applies the optimizer, and hands every worker the new
parameters, over RDMA, TCP or shared memory. This package has the server, its
configuration and a systemd service: systemctl enable --now phub")
# RDMA's libraries are opened at run time (transport/verbs/library.h).
set(rdma_packages "libibverbs1, librdmacm1, ibverbs-providers")
set(CPACK_DEBIAN_SERVER_PACKAGE_RECOMMENDS ${rdma_packages})
# So is libfabric (transport/ofi/library.h), which only the transport ofi needs, and libbpf, for `phub switch`.
set(CPACK_DEBIAN_SERVER_PACKAGE_SUGGESTS "libfabric1, libbpf1")
set(CPACK_DEBIAN_SERVER_PACKAGE_CONTROL_EXTRA
  ${CMAKE_CURRENT_LIST_DIR}/server/conffiles ${CMAKE_CURRENT_LIST_DIR}/server/postinst
  ${CMAKE_CURRENT_LIST_DIR}/server/prerm ${CMAKE_CURRENT_LIST_DIR}/server/postrm)

set(CPACK_DEBIAN_WORKER_PACKAGE_NAME libphub-worker0)
set(CPACK_DEBIAN_WORKER_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_WORKER_PACKAGE_RECOMMENDS ${rdma_packages})
set(CPACK_DEBIAN_WORKER_PACKAGE_SUGGESTS libfabric1)
set(CPACK_COMPONENT_WORKER_DESCRIPTION "The client library: what a training process
links or loads, from C++, C or any language that can call C.")
# What dpkg-shlibdeps writes into the packages of programs that link the library.
file(CONFIGURE OUTPUT ${packages_dir}/shlibs
  CONTENT "libphub_worker 0 libphub-worker0 (>= ${PROJECT_VERSION})\n")
set(CPACK_DEBIAN_WORKER_PACKAGE_CONTROL_EXTRA ${packages_dir}/shlibs
  ${CMAKE_CURRENT_LIST_DIR}/worker/triggers)

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libphub-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libphub-worker0 (= ${PROJECT_VERSION}), libfmt-dev")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS
  "cmake, libhwy-dev, libhwloc-dev, libssl-dev")
set(CPACK_COMPONENT_DEV_DESCRIPTION "What programs in C++20 and C need to be built
with libphub_worker, by CMake (find_package) or pkg-config, shared or static,
and an example in Python.")

set(CPACK_DEBIAN_BENCH_PACKAGE_NAME phub-bench)
set(CPACK_COMPONENT_BENCH_DESCRIPTION "Benchmarks of phub: zerocompute exchanges the gradients
of real models with no computation.
In /usr/libexec/phub, kernels_bench measures sums and optimizers, and digits
trains a small network on handwritten digits.")

# Debian's own files of each package.
file(READ ${CMAKE_CURRENT_LIST_DIR}/changelog changelog)
file(CONFIGURE OUTPUT ${packages_dir}/changelog CONTENT "${changelog}" @ONLY)
execute_process(COMMAND gzip -9nfk changelog WORKING_DIRECTORY ${packages_dir})
foreach(component SERVER WORKER DEV BENCH)
  string(TOLOWER ${component} lower)
  install(FILES ${packages_dir}/changelog.gz ${CMAKE_CURRENT_LIST_DIR}/copyright
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${component}_PACKAGE_NAME}
    COMPONENT ${lower})
endforeach()
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/phub-server COMPONENT server)
install(FILES worker/README.md DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libphub-dev COMPONENT dev)

include(CPack)
