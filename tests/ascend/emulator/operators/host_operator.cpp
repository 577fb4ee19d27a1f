#include "host_operator.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <exception>

#include "queue.hpp"
#include "random.hpp"
#include "tensors.hpp"

namespace ascend {
namespace {

bool is_tensor_type(const c10::TypePtr& type) {
  const std::string text = type->str();
  return text == "Tensor" || text == "Tensor?" || text == "Tensor[]" || text == "Tensor?[]";
}

// Lists of dozens of tensors: their shapes are those of the arguments, and cost too much to check.
bool is_foreach(const std::string& name) {
  return name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_adam") ||
         name.starts_with("aten::_amp_foreach_");
}

std::optional<size_t> argument_with_alias(const c10::FunctionSchema& schema,
                                          const c10::Argument& result) {
  if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) return std::nullopt;
  const auto& wanted = result.alias_info()->beforeSets();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == wanted) return i;
  }
  return std::nullopt;
}

}  // namespace

// One call: its arguments as the caller gave them, and as the CPU's kernel takes them.
struct HostOperator::Call {
  c10::Stack given;
  c10::Stack host;
  c10::Device device{c10::DeviceType::PrivateUse1, -1};
};

HostOperator::HostOperator(const c10::OperatorHandle& op)
    : op_(op), num_arguments_(op.schema().arguments().size()) {
  const auto& schema = op.schema();
  for (size_t i = 0; i < num_arguments_; ++i) {
    const auto& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (is_written) written_.push_back(i);
    if (is_written && argument.kwarg_only()) outputs_.push_back(i);
    if (argument.type()->str() == "Generator?") generator_ = i;
  }
  for (const auto& result : schema.returns()) {
    argument_of_result_.push_back(argument_with_alias(schema, result));
    has_new_results_ |= !argument_of_result_.back().has_value();
    has_only_tensors_ &= is_tensor_type(result.type());
  }
  has_shapes_ = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) &&
                (has_new_results_ || !is_foreach(schema.name()));
}

void HostOperator::operator()(const c10::OperatorHandle&, c10::DispatchKeySet,
                              c10::Stack* stack) const {
  Call call;
  call.given.assign(stack->end() - static_cast<int64_t>(num_arguments_), stack->end());
  for (const auto& value : call.given)
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_on_npu(tensor) && !call.device.has_index()) call.device = tensor.device();
    });
  const c10::OptionalDeviceGuard guard(
      call.device.has_index() ? std::optional(call.device) : std::nullopt);
  const bool is_for_host = writes_to_host(call);
  const auto known =
      has_only_tensors_ && has_shapes_ && !is_for_host ? shapes(call) : std::nullopt;
  if (known) resize_outputs(call, *known);
  for (const auto& value : call.given)
    call.host.push_back(changed(value, [&](const at::Tensor& tensor) {
      if (is_on_npu(tensor)) return host_view(tensor);
      // The caller may change what is its own on the host before the work runs.
      return is_for_host ? tensor : own_copy(tensor);
    }));
  if (generator_) {
    const auto given = call.given[*generator_].toOptional<at::Generator>();
    call.host[*generator_] = host_generator(given, call.device.index());
  }
  c10::Stack results;
  const bool is_in_place = has_only_tensors_ && !has_new_results_ && outputs_.empty();
  if ((known || is_in_place) && !is_for_host) {
    run_later(call, known, results);
  } else {
    run_now(call, results);
  }
  torch::jit::drop(*stack, num_arguments_);
  for (auto& result : results) stack->push_back(std::move(result));
}

// As a copy of a list of tensors to the host does: the caller reads it as soon as this returns.
bool HostOperator::writes_to_host(const Call& call) const {
  bool found = false;
  for (const size_t i : written_)
    each_tensor(call.given[i], [&](const at::Tensor& tensor) { found |= !is_on_npu(tensor); });
  return found;
}

// None where the operator's shapes depend on the data, or its kernel for "meta" does not take this.
std::optional<c10::Stack> HostOperator::shapes(const Call& call) const {
  c10::Stack stack;
  for (const auto& value : call.given) stack.push_back(changed(value, without_memory));
  if (generator_) stack[*generator_] = c10::IValue();
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op_.callBoxed(stack);
    return stack;
  } catch (const std::exception&) {
    // Where it is the caller's mistake, the CPU's kernel says so, in `run_now`.
    return std::nullopt;
  }
}

void HostOperator::resize_outputs(Call& call, const c10::Stack& shapes) const {
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto argument = argument_of_result_[i];
    if (!argument || !shapes[i].isTensor()) continue;
    if (std::find(outputs_.begin(), outputs_.end(), *argument) == outputs_.end()) continue;
    at::Tensor output = call.given[*argument].toTensor();
    if (output.sizes() != shapes[i].toTensor().sizes()) output.resize_(shapes[i].toTensor().sizes());
  }
}

void HostOperator::run_later(Call& call, const std::optional<c10::Stack>& shapes,
                             c10::Stack& results) const {
  auto written = std::make_shared<std::vector<c10::IValue>>();
  for (size_t i = 0; i < argument_of_result_.size(); ++i) {
    if (const auto argument = argument_of_result_[i]) {
      results.push_back(call.given[*argument]);
      written->emplace_back();
      continue;
    }
    results.push_back(changed((*shapes)[i], [&](const at::Tensor& shape) {
      return like_on_npu(shape, call.device);
    }));
    written->push_back(changed(results.back(), host_view));
  }
  auto arguments = std::make_shared<c10::Stack>(std::move(call.host));
  enqueue(op_.schema().name(), [op = op_, arguments, written] {
    c10::Stack stack = *arguments;
    op.callBoxed(stack);
    for (size_t i = 0; i < written->size(); ++i) {
      if ((*written)[i].isNone()) continue;
      std::vector<at::Tensor> from;
      each_tensor(stack[i], [&](const at::Tensor& tensor) { from.push_back(tensor); });
      size_t next = 0;
      each_tensor((*written)[i], [&](const at::Tensor& to) {
        TORCH_CHECK(next < from.size() && to.sizes() == from[next].sizes() &&
                        to.scalar_type() == from[next].scalar_type(),
                    op.schema().name(), ": the shape of result ", i, " was not foreseen");
        to.copy_(from[next++]);
      });
    }
  });
}

void HostOperator::run_now(Call& call, c10::Stack& results) const {
  // Outputs get their size from the kernel, and memory of the device cannot be resized there.
  for (const size_t i : outputs_)
    call.host[i] = changed(call.given[i], [](const at::Tensor& tensor) {
      return at::empty({0}, tensor.options().device(at::kCPU));
    });
  auto arguments = std::make_shared<c10::Stack>(std::move(call.host));
  auto error = std::make_shared<std::exception_ptr>();
  enqueue(op_.schema().name(), [op = op_, arguments, error] {
    try {
      op.callBoxed(*arguments);
    } catch (...) {
      *error = std::current_exception();
    }
  });
  wait_for_current_stream();
  if (*error) std::rethrow_exception(*error);
  for (size_t i = 0; i < argument_of_result_.size(); ++i) {
    const auto argument = argument_of_result_[i];
    const c10::IValue& computed = (*arguments)[i];
    if (argument) {
      results.push_back(call.given[*argument]);
      if (std::find(outputs_.begin(), outputs_.end(), *argument) == outputs_.end()) continue;
      at::Tensor output = call.given[*argument].toTensor();
      output.resize_(computed.toTensor().sizes());
      host_view(output).copy_(computed.toTensor());
      continue;
    }
    results.push_back(changed(computed, [&](const at::Tensor& tensor) {
      at::Tensor made = like_on_npu(tensor, call.device);
      host_view(made).copy_(tensor);
      return made;
    }));
  }
}

}  // namespace ascend
