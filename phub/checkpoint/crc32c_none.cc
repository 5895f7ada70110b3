// What is built for CPUs whose instruction for CRC-32C is not known here.
#include "phub/checkpoint/crc32c.h"

namespace phub {

Crc32cStep hardware_crc32c() { return nullptr; }

}  // namespace phub
