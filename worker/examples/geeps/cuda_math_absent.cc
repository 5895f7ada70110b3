// Stands in where there is no CUDA compiler.
#include "transport/error.h"
#include "worker/examples/geeps/device_math.h"

namespace phub::examples {

std::unique_ptr<Math> make_cuda_math(Stream& /*stream*/, int /*ordinal*/) {
  fail(ErrorCode::kUnavailable, "this build has no CUDA");
}

}  // namespace phub::examples
