// The operator that ProcessGroupHCCL calls by itself, past PyTorch's dispatcher: it pads what it
// gathers to the alignment of HCCL's buffers.
#include <ATen/ops/constant_pad_nd.h>

#include "arguments.hpp"

ASCEND_EXPORT int aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* pad,
                                                     const aclScalar* value, aclTensor* out,
                                                     uint64_t* workspace_size,
                                                     aclOpExecutor** executor) {
  const auto work = [from = self->tensor, to = out->tensor, widths = pad->values,
                     with = value->value] {
    to.copy_(at::constant_pad_nd(from, widths, with));
  };
  return ascend::plan(work, workspace_size, executor);
}

ASCEND_EXPORT int aclnnConstantPadNd(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return ascend::run(executor, stream);
}
