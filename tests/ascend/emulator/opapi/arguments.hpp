// Arguments of aclnn operators, as torch_npu makes them: tensors of the host over device memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl_base.h>

#include <functional>
#include <vector>

#define ASCEND_EXPORT extern "C" __attribute__((visibility("default")))

struct aclTensor {
  at::Tensor tensor;
};

struct aclScalar {
  at::Scalar value;
};

struct aclIntArray {
  std::vector<int64_t> values;
};

// What the first call of an operator has planned, and its second one gives to the stream.
struct aclOpExecutor {
  std::function<void()> work;
};

namespace ascend {

// Plans an operator; `aclnnX` then hands it to `run`.
int plan(std::function<void()> work, uint64_t* workspace_size, aclOpExecutor** executor);

// Runs a planned operator in the order of the stream, once.
int run(aclOpExecutor* executor, aclrtStream stream);

}  // namespace ascend
