// Puts operators of the host in the place of torch_npu's kernels.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "copy.hpp"
#include "host_operator.hpp"

namespace ascend {
namespace {

// torch_npu's own: they make tensors, look at them in another way, or concern the allocator.
const std::unordered_set<std::string>& kept() {
  static const std::unordered_set<std::string> names = {
      "aten::_copy_from",     "aten::_copy_from_and_resize", "aten::_local_scalar_dense",
      "aten::_pin_memory",    "aten::as_strided_",           "aten::empty.memory_format",
      "aten::empty_strided",  "aten::is_pinned",             "aten::record_stream",
      "aten::resize_",        "aten::set_",                  "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset",            "aten::set_.source_Tensor",
      "aten::is_set_to",
  };
  return names;
}

// PyTorch's definition by other operators, which then run one by one: they make tensors of a
// device, or may return their argument.
const std::unordered_set<std::string>& by_definition() {
  static const std::unordered_set<std::string> names = {
      "aten::_lazy_clone", "aten::_to_copy",   "aten::clone",
      "aten::contiguous",  "aten::empty_like", "aten::new_empty_strided",
      "aten::resize_as_",
  };
  return names;
}

// A kernel that PyTorch has for another device, called with tensors of the NPU.
class Borrowed : public c10::OperatorKernel {
 public:
  Borrowed(const c10::OperatorHandle& op, c10::DispatchKey key)
      : kernel_(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  c10::Stack* stack) const {
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
};

bool returns_a_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

bool takes_a_device(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.type()->str() == "Device?" || argument.type()->str() == "Device") return true;
  return false;
}

template <typename Kernel, typename... Arguments>
torch::CppFunction boxed(Arguments&&... arguments) {
  return torch::CppFunction::makeFromBoxedFunctor(
      std::make_unique<Kernel>(std::forward<Arguments>(arguments)...));
}

void register_operator(torch::Library& library, const c10::OperatorHandle& op) {
  const std::string name = c10::toString(op.operator_name());
  if (name == "aten::copy_") {
    library.impl(name.c_str(), boxed<Copy>(op));
    return;
  }
  const bool is_by_definition = by_definition().contains(name) || takes_a_device(op.schema());
  if (kept().contains(name) || (returns_a_view(op.schema()) && !is_by_definition)) return;
  if (name == "aten::native_dropout") return;
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && takes_a_device(op.schema())) return;
  if (is_by_definition) {
    library.impl(name.c_str(), boxed<Borrowed>(op, c10::DispatchKey::CPU));
  } else {
    library.impl(name.c_str(), boxed<HostOperator>(op));
  }
}

// The CPU's kernel draws from a generator that is not among its arguments.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (input.numel() == 0 || (train.has_value() && !*train))
    return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

void replace_kernels(torch::Library& library, torch::Library& autograd) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::PrivateUse1);
  // Names of torch_npu's own operators are here, too, which have no schema in this namespace.
  for (const auto& name : names)
    if (const auto op = dispatcher.findSchema(name); op && name.name.starts_with("aten::"))
      register_operator(library, *op);
  library.impl("native_dropout", native_dropout);
  // Derivatives by PyTorch's formulas: torch_npu's own ones are for its fused kernels.
  const auto differentiated =
      dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::AutogradPrivateUse1);
  for (const auto& name : differentiated) {
    const auto op = dispatcher.findSchema(name);
    const bool is_known = op && name.name.starts_with("aten::") &&
                          op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    if (!is_known) continue;
    autograd.impl(c10::toString(name).c_str(),
                  boxed<Borrowed>(*op, c10::DispatchKey::AutogradCPU));
  }
}

// PyTorch warns of the first kernel that takes another one's place.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

}  // namespace
}  // namespace ascend

// Called once, after torch_npu has been imported.
extern "C" __attribute__((visibility("default"))) void ascend_install_operators() {
  using torch::Library;
  // Never destroyed: that would take the kernels out again.
  static auto* library = new Library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                     __FILE__, __LINE__);
  static auto* autograd = new Library(Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1,
                                      __FILE__, __LINE__);
  ascend::Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  ascend::replace_kernels(*library, *autograd);
}
