#include "hccl_operation.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "errors.hpp"
#include "hccl_errors.hpp"
#include "hccl_fault.hpp"

namespace hccl {
namespace {

constexpr uint64_t kAnswer = 1ull << 62;  // of a message, beside its number

// Runs what a stream took, and turns what ended it into its error.
template <typename Run>
ascend::Error run_on_stream(Communicator& communicator, const ascend::Interrupt& interrupt,
                            const char* name, Run run) {
  try {
    Exchange exchange(communicator, interrupt, name);
    if (const ascend::Error error = strike(communicator, interrupt)) return error;
    run(exchange);
    return 0;
  } catch (const Stopped& stopped) {
    if (interrupt.requested()) return stopped.error;
    return fail_device(communicator, stopped.error, ascend::take_error_message());
  }
}

Result submit_work(void* stream, ascend::Work work) {
  return ascend::submit(stream, std::move(work)) == 0 ? Result::success : Result::runtime;
}

std::vector<size_t> all_ranks(const Communicator& communicator) {
  std::vector<size_t> ranks(communicator.members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

struct Message {
  SendReceive item;
  Tag tag;
};

Tag answer_to(const Tag& tag) { return {tag.epoch, tag.number | kAnswer, tag.signature}; }

// A sender waits until its message was taken, as on a device, where both ends are needed.
void exchange_messages(Exchange& exchange, const std::vector<Message>& messages) {
  for (const auto& [item, tag] : messages) {
    if (item.direction != Direction::send) continue;
    exchange.send(item.peer, tag, item.buffer, item.count * size_of(item.type));
  }
  for (const auto& [item, tag] : messages) {
    if (item.direction != Direction::receive) continue;
    exchange.receive(item.peer, tag, item.buffer, item.count * size_of(item.type));
    exchange.send(item.peer, answer_to(tag), nullptr, 0);
  }
  for (const auto& [item, tag] : messages) {
    if (item.direction == Direction::send) exchange.receive(item.peer, answer_to(tag));
  }
}

}  // namespace

uint64_t signature_of(const Call& call) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&](const void* bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
      hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 0x100000001b3;
    }
  };
  add(call.name, std::strlen(call.name));
  add(&call.type, sizeof(call.type));
  add(&call.count, sizeof(call.count));
  add(&call.detail, sizeof(call.detail));
  return hash;
}

Result submit(void* handle, void* stream, const Call& call,
              std::function<void(const Operation&)> run) {
  const auto communicator = find_communicator(handle);
  if (!communicator) return Result::pointer;
  if (const Result result = communicator->prepare(all_ranks(*communicator));
      result != Result::success) {
    return result;
  }
  const Tag tag = communicator->next_collective(signature_of(call));
  return submit_work(stream, [communicator, tag, name = call.name,
                              run = std::move(run)](const ascend::Interrupt& interrupt) {
    return run_on_stream(*communicator, interrupt, name, [&](Exchange& exchange) {
      run({*communicator, exchange, tag});
    });
  });
}

Result submit_messages(void* handle, void* stream, const char* name,
                       const std::vector<SendReceive>& items) {
  const auto communicator = find_communicator(handle);
  if (!communicator) return Result::pointer;
  std::vector<size_t> peers;
  for (const SendReceive& item : items) {
    if (item.peer >= communicator->members.size()) {
      report_parameter(name, "remoteRank", std::to_string(item.peer),
                       "less than " + std::to_string(communicator->members.size()));
      return Result::parameter;
    }
    peers.push_back(item.peer);
  }
  std::ranges::sort(peers);
  if (const Result result = communicator->prepare(peers); result != Result::success) return result;
  std::vector<Message> messages;
  for (const SendReceive& item : items) {
    const uint64_t signature = signature_of({"message", item.type, item.count});
    messages.push_back({item, item.direction == Direction::send
                                  ? communicator->next_send(item.peer, signature)
                                  : communicator->next_receive(item.peer, signature)});
  }
  return submit_work(stream, [communicator, name, messages](const ascend::Interrupt& interrupt) {
    return run_on_stream(*communicator, interrupt, name,
                         [&](Exchange& exchange) { exchange_messages(exchange, messages); });
  });
}

}  // namespace hccl
