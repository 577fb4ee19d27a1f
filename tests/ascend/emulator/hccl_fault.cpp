#include "hccl_fault.hpp"

#include <poll.h>

#include <cstdlib>
#include <sstream>
#include <string>

#include "fault.hpp"
#include "hccl_count.hpp"
#include "hccl_errors.hpp"
#include "machine.hpp"

namespace hccl {
namespace {

constexpr uint64_t kRetryFailed = ~0ull;  // number of a message that no operation has

Tag failure_tag(uint64_t epoch) { return {epoch, kRetryFailed, 0}; }

void pause(int64_t duration_ms, const ascend::Interrupt& interrupt) {
  pollfd one{interrupt.descriptor(), POLLIN, 0};
  if (!interrupt.requested()) poll(&one, 1, static_cast<int>(duration_ms));
}

ascend::Error fail(const Communicator& communicator, ascend::Error code) {
  return fail_device(communicator, code,
                     ascend::inner_error("rtStreamSynchronize", ascend::reason_of(code)));
}

// The links to other servers: what a network port carries.
std::vector<size_t> remote_peers(const Communicator& communicator) {
  std::vector<size_t> peers;
  for (size_t peer = 0; peer < communicator.members.size(); peer++) {
    if (!communicator.is_same_server(peer)) peers.push_back(peer);
  }
  return peers;
}

// A link that fails for a moment: HCCL runs the operation again, where that is switched on.
ascend::Error flicker(const Communicator& communicator, const ascend::Interrupt& interrupt) {
  const Retry retry = read_retry();
  if (!retry.is_enabled) return fail(communicator, ACL_ERROR_RT_LINK_ERROR);
  count("(retry of an operation)");
  pause(retry.hold_ms, interrupt);
  return interrupt.requested() ? interrupt.error() : ascend::kSuccess;
}

}  // namespace

Retry read_retry() {
  Retry retry;
  const char* enable = std::getenv("HCCL_OP_RETRY_ENABLE");  // "L1:1,L2:0"
  retry.is_enabled = enable != nullptr && std::string(enable).find(":1") != std::string::npos;
  const char* parameters = std::getenv("HCCL_OP_RETRY_PARAMS");  // "MaxCnt:1,HoldTime:5000,..."
  std::istringstream words(parameters == nullptr ? "" : parameters);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t colon = word.find(':');
    if (colon == std::string::npos) continue;
    const int64_t value = std::strtoll(word.c_str() + colon + 1, nullptr, 10);
    if (word.starts_with("MaxCnt:")) retry.max_count = value;
    if (word.starts_with("HoldTime:")) retry.hold_ms = value;
    if (word.starts_with("IntervalTime:")) retry.interval_ms = value;
  }
  return retry;
}

ascend::Error fail_device(const Communicator& communicator, ascend::Error code,
                          const std::string& text) {
  {
    ascend::Lock guard(ascend::machine().lock);
    ascend::fail_device(guard, *ascend::find_device(communicator.device), code, text);
  }
  ascend::set_error_message(text.c_str());
  return code;
}

ascend::Error strike(Communicator& communicator, const ascend::Interrupt& interrupt) {
  const int32_t device = communicator.device;
  if (ascend::take_fault(device, "network")) communicator.links.cut(remote_peers(communicator));
  if (ascend::take_fault(device, "retry")) {
    const ascend::Error error = flicker(communicator, interrupt);
    if (error != ascend::kSuccess) return error;
  }
  const ascend::Error error = ascend::strike(device, ascend::Site::kCommunication, interrupt);
  if (error == ACL_ERROR_RT_COMM_OP_RETRY_FAIL) return fail_retry(communicator, communicator.epoch());
  return error;
}

ascend::Error fail_retry(Communicator& communicator, uint64_t epoch) {
  for (size_t peer = 0; peer < communicator.members.size(); peer++) {
    if (peer != communicator.rank) communicator.links.send(peer, failure_tag(epoch), nullptr, 0);
  }
  return fail(communicator, ACL_ERROR_RT_COMM_OP_RETRY_FAIL);
}

bool has_failed_elsewhere(Communicator& communicator, uint64_t epoch) {
  for (size_t peer = 0; peer < communicator.members.size(); peer++) {
    if (!communicator.links.take(peer, failure_tag(epoch))) continue;
    fail(communicator, ACL_ERROR_RT_COMM_OP_RETRY_FAIL);
    return true;
  }
  return false;
}

}  // namespace hccl
