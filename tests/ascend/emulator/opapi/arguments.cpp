#include "arguments.hpp"

#include <ATen/ops/from_blob.h>

#include <exception>
#include <memory>

#include "errors.hpp"
#include "stream.hpp"

namespace {

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_BOOL: return at::kBool;
    default: TORCH_CHECK(false, "Ascend emulator: no aclTensor of aclDataType ", type);
  }
}

at::Scalar scalar(const void* value, aclDataType type) {
  return at::from_blob(const_cast<void*>(value), {}, at::TensorOptions(scalar_type(type))).item();
}

}  // namespace

namespace ascend {

int plan(std::function<void()> work, uint64_t* workspace_size, aclOpExecutor** executor) {
  *workspace_size = 0;
  *executor = new aclOpExecutor{std::move(work)};
  return kSuccess;
}

int run(aclOpExecutor* executor, aclrtStream stream) {
  const std::shared_ptr<aclOpExecutor> planned(executor);
  return submit(stream, [planned](const Interrupt&) -> Error {
    try {
      planned->work();
      return kSuccess;
    } catch (const std::exception& error) {
      set_error_message(inner_error("aclnn", error.what()).c_str());
      return ACL_ERROR_RT_AICORE_EXCEPTION;
    }
  });
}

}  // namespace ascend

ASCEND_EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t num_sizes,
                                         aclDataType type, const int64_t* strides, int64_t offset,
                                         aclFormat, const int64_t*, uint64_t, void* data) {
  const auto options = at::TensorOptions(scalar_type(type));
  char* first = static_cast<char*>(data) + offset * static_cast<int64_t>(options.dtype().itemsize());
  return new aclTensor{at::from_blob(first, {sizes, num_sizes}, {strides, num_sizes}, options)};
}

ASCEND_EXPORT int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return ascend::kSuccess;
}

ASCEND_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType type) {
  return new aclScalar{scalar(value, type)};
}

ASCEND_EXPORT int aclDestroyScalar(const aclScalar* one) {
  delete one;
  return ascend::kSuccess;
}

ASCEND_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}

ASCEND_EXPORT int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return ascend::kSuccess;
}
