#include "hccl_exchange.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <limits>
#include <stdexcept>

#include "acl/acl_rt.h"
#include "hccl_errors.hpp"
#include "hccl_fault.hpp"

namespace hccl {
namespace {

constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
constexpr int64_t kSliceMs = 200;
constexpr ascend::Error kRetryFailed = ACL_ERROR_RT_COMM_OP_RETRY_FAIL;

// How long a network card sends again before it reports an error: HCCL_RDMA_RETRY_CNT times
// 4.096 us * 2^HCCL_RDMA_TIMEOUT, by default 7 times 4.3 s.
int64_t retransmission_ms() {
  const auto exponent = static_cast<double>(environment_number("HCCL_RDMA_TIMEOUT", 20));
  const auto count = static_cast<double>(environment_number("HCCL_RDMA_RETRY_CNT", 7));
  return static_cast<int64_t>(std::ceil(count * 4.096e-3 * std::exp2(exponent)));
}

std::string date() {
  const std::time_t now = std::time(nullptr);
  tm local{};
  localtime_r(&now, &local);
  char text[64];
  strftime(text, sizeof(text), "%a %b %e %H:%M:%S %Y", &local);
  return text;
}

}  // namespace

Exchange::Exchange(Communicator& communicator, const ascend::Interrupt& interrupt, std::string name)
    : communicator_(communicator),
      interrupt_(interrupt),
      name_(std::move(name)),
      begun_ms_(now_ms()) {
  communicator_.links.watch(wake_);
}

Exchange::~Exchange() { communicator_.links.unwatch(wake_); }

void Exchange::send(size_t peer, const Tag& tag, const void* data, size_t size) {
  communicator_.links.send(peer, tag, data, size);
}

// False where `until_ms` has passed.
bool Exchange::wait(int64_t until_ms) {
  if (interrupt_.requested()) throw Stopped{interrupt_.error()};
  if (communicator_.links.is_closed()) {
    report_inner("the communicator [" + communicator_.settings.name + "] was destroyed while [" +
                 name_ + "] was running");
    throw Stopped{kCommunicatorDestroyed};
  }
  const int64_t left_ms = until_ms - now_ms();
  if (left_ms <= 0) return false;
  pollfd events[2] = {{wake_.get(), POLLIN, 0}, {interrupt_.descriptor(), POLLIN, 0}};
  poll(events, 2, static_cast<int>(std::min(left_ms, kSliceMs)));
  return true;
}

Buffer Exchange::receive(size_t peer, const Tag& tag) {
  const int64_t timeout_s = communicator_.settings.exec_timeout_s;
  // One more, as now_ms() leaves off the part of a millisecond that has passed already.
  const int64_t until_ms = timeout_s == 0 ? kForever : now_ms() + timeout_s * 1000 + 1;
  while (true) {
    wake_.clear();  // before looking, so that what comes afterwards wakes
    if (auto frame = communicator_.links.take(peer, tag)) return std::move(*frame);
    if (has_failed_elsewhere(communicator_, tag.epoch)) throw Stopped{kRetryFailed};
    look_for_remote_error(peer, tag);
    if (!wait(until_ms)) time_out(peer);
  }
}

void Exchange::receive(size_t peer, const Tag& tag, void* into, size_t size) {
  const Buffer frame = receive(peer, tag);
  if (frame.size > 0) std::memcpy(into, frame.bytes.get(), std::min(frame.size, size));
}

// The network between servers reports a peer that does not answer, or HCCL retries the operation in
// vain; the links within a server report nothing.
void Exchange::look_for_remote_error(size_t peer, const Tag& tag) {
  if (communicator_.is_same_server(peer)) return;
  const Links::Peer remote = communicator_.links.peer(peer);
  if (remote.state != LinkState::lost) return;
  const int64_t lost_for_ms = now_ms() - std::max(remote.lost_ms, begun_ms_);
  if (lost_for_ms < retransmission_ms()) return;
  const Retry retry = read_retry();
  if (!retry.is_enabled) {
    communicator_.find_remote_error(peer);
  } else if (lost_for_ms >= retransmission_ms() + retry.total_ms()) {
    throw Stopped{fail_retry(communicator_, tag.epoch)};
  }
}

void Exchange::time_out(size_t peer) {
  std::string abnormal;
  if (communicator_.links.peer(peer).state == LinkState::lost) {
    abnormal = "\nthere are(is) 1 abnormal device(s):\n    Cluster Exception Location[IP/ID]:[" +
               communicator_.location(peer) + "], Arrival Time:[" + date() + "], Discoverer:[" +
               communicator_.location(communicator_.rank) +
               "], ExceptionType:[Heartbeat Lost Occurred], Possible Reason:1. Process has exited, "
               "2. Network Disconnected\n";
  }
  report_notify_timeout(std::to_string(peer), "tag[" + name_ + "_" + communicator_.settings.name + "]",
                        abnormal);
  throw Stopped{kNotifyTimeout};
}

}  // namespace hccl
