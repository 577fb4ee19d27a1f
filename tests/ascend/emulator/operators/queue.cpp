#include "queue.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>

#include "errors.hpp"
#include "fault.hpp"
#include "stream.hpp"
#include "torch_npu/csrc/core/npu/NPUStream.h"

// As in torch_npu/csrc/framework/OpCommand.h, which includes much that is not needed here.
namespace at_npu::native {
class OpCommand {
 public:
  static void RunOpApiV2(const std::string& name, const std::function<int()>& launch, bool sync);
};
}  // namespace at_npu::native

namespace ascend {
namespace {

// The stream's thread computes with as many threads as the one that asked, or sums would differ.
void use_threads(int count) {
  if (at::get_num_threads() != count) at::set_num_threads(count);
}

Error run(const std::function<void()>& work, const std::string& name, int num_threads) {
  try {
    use_threads(num_threads);
    at::AutoDispatchBelowADInplaceOrView below;
    work();
    return kSuccess;
  } catch (const std::exception& error) {
    const std::string text =
        "EZ9999: Inner Error!\nEZ9999: The kernel of " + name + " failed: " + error.what() + "\n" +
        inner_error("rtStreamSynchronize", reason_of(ACL_ERROR_RT_AICORE_EXCEPTION));
    set_error_message(text.c_str());
    return ACL_ERROR_RT_AICORE_EXCEPTION;
  }
}

}  // namespace

void enqueue(const std::string& operator_name, std::function<void()> work) {
  const c10_npu::NPUStream current = c10_npu::getCurrentNPUStream();
  const StreamHandle stream = current.stream(false);
  const int num_threads = at::get_num_threads();
  const int32_t device = current.device_index();
  const auto launch = [stream, device, num_threads, operator_name, work = std::move(work)] {
    return submit(stream, [=](const Interrupt& interrupt) {
      const Error struck = strike(device, Site::kOperator, interrupt);
      return struck == kSuccess ? run(work, operator_name, num_threads) : struck;
    });
  };
  at_npu::native::OpCommand::RunOpApiV2(operator_name, launch, false);
}

void wait_for_current_stream() { c10_npu::getCurrentNPUStream().synchronize(); }

}  // namespace ascend
