// An operator of ATen on the NPU: the CPU's kernel over the device's memory, in the stream's order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace ascend {

// The shapes of results are known beforehand from the operator's kernel for the device "meta", so
// that the host does not wait. Where they depend on the data, or a result is not a tensor, the host
// waits for the stream.
class HostOperator : public c10::OperatorKernel {
 public:
  explicit HostOperator(const c10::OperatorHandle& op);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const;

 private:
  struct Call;

  bool writes_to_host(const Call& call) const;
  std::optional<c10::Stack> shapes(const Call& call) const;
  void run_later(Call& call, const std::optional<c10::Stack>& shapes, c10::Stack& results) const;
  void run_now(Call& call, c10::Stack& results) const;
  void resize_outputs(Call& call, const c10::Stack& shapes) const;

  c10::OperatorHandle op_;
  size_t num_arguments_;
  // For each result the argument that it is, or none where it is new.
  std::vector<std::optional<size_t>> argument_of_result_;
  std::vector<size_t> written_;
  std::vector<size_t> outputs_;  // arguments after "*" that are written: they may be resized
  std::optional<size_t> generator_;
  bool has_new_results_ = false;
  bool has_only_tensors_ = true;
  bool has_shapes_ = true;
};

}  // namespace ascend
