// checkpoint_sample DIR: writes the checkpoint that tests know every byte of. With it those in
// golden/ were made.
#include <cstdio>
#include <exception>

#include "tests/phub/checkpoint_rig.h"

int main(int argc, char** argv) {
  using namespace phub;           // NOLINT: a test's tool
  using namespace phub::testing;  // NOLINT
  if (argc != 2) {
    std::fprintf(stderr, "usage: checkpoint_sample DIR\n");
    return 2;
  }
  try {
    CheckpointStore store(argv[1], 1);
    write_checkpoint(store, {.round = 123, .epoch = 4});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
