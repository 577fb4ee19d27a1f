#include "hccl_collectives.hpp"

#include <cstring>

#include "hccl_reduce.hpp"

namespace hccl {
namespace {

// An all-reduce of at most this size sends whole inputs: one round instead of two.
constexpr size_t kOneRoundBytes = 32 * 1024;

// Messages of one operation between the same two ranks: its data, then what answers it.
enum class Round : uint64_t { data = 0, answer = 1 };

Tag in_round(const Tag& tag, Round round) {
  return {tag.epoch, tag.number, tag.signature << 1 | static_cast<uint64_t>(round)};
}

struct Peers {
  explicit Peers(const Operation& operation)
      : rank(operation.communicator.rank), size(operation.communicator.members.size()) {}

  template <typename Do>
  void each(Do act) const {
    // Each rank begins with the one after it, so that not all send to rank 0 first.
    for (size_t step = 1; step < size; step++) act((rank + step) % size);
  }

  const size_t rank;
  const size_t size;
};

const char* at(const void* buffer, size_t offset) { return static_cast<const char*>(buffer) + offset; }
char* at(void* buffer, size_t offset) { return static_cast<char*>(buffer) + offset; }

void move(void* to, const void* from, size_t size) {
  if (size > 0 && to != from) std::memmove(to, from, size);
}

// Every rank's part of this rank's range, in the order of ranks; the frames keep what was received.
std::vector<const void*> gather_range(const Operation& operation, const void* own,
                                      std::vector<Buffer>& frames) {
  const Peers peers(operation);
  const Tag tag = in_round(operation.tag, Round::data);
  std::vector<const void*> inputs(peers.size, own);
  frames.resize(peers.size);
  peers.each([&](size_t peer) {
    frames[peer] = operation.exchange.receive(peer, tag);
    inputs[peer] = frames[peer].bytes.get();
  });
  return inputs;
}

void send_parts(const Operation& operation, const void* input, const std::vector<Part>& parts) {
  const Tag tag = in_round(operation.tag, Round::data);
  Peers(operation).each([&](size_t peer) {
    operation.exchange.send(peer, tag, at(input, parts[peer].offset), parts[peer].size);
  });
}

std::vector<Part> equal_parts(size_t size, size_t num_ranks) {
  std::vector<Part> parts;
  for (size_t rank = 0; rank < num_ranks; rank++) parts.push_back({rank * size, size});
  return parts;
}

// The root of a one-way operation waits until all have what it sent, as a device's does.
void acknowledge(const Operation& operation, size_t root) {
  const Tag tag = in_round(operation.tag, Round::answer);
  const Peers peers(operation);
  if (peers.rank != root) {
    operation.exchange.send(root, tag, nullptr, 0);
  } else {
    peers.each([&](size_t peer) { operation.exchange.receive(peer, tag); });
  }
}

}  // namespace

void barrier(const Operation& operation) {
  const Tag tag = in_round(operation.tag, Round::data);
  const Peers peers(operation);
  peers.each([&](size_t peer) { operation.exchange.send(peer, tag, nullptr, 0); });
  peers.each([&](size_t peer) { operation.exchange.receive(peer, tag); });
}

void broadcast(const Operation& operation, void* buffer, size_t size, size_t root) {
  const Tag tag = in_round(operation.tag, Round::data);
  const Peers peers(operation);
  if (peers.rank == root) {
    peers.each([&](size_t peer) { operation.exchange.send(peer, tag, buffer, size); });
  } else {
    operation.exchange.receive(root, tag, buffer, size);
  }
  acknowledge(operation, root);
}

void all_gather(const Operation& operation, const void* input, size_t size, void* output,
                const std::vector<Part>& parts) {
  const Tag tag = in_round(operation.tag, Round::data);
  const Peers peers(operation);
  peers.each([&](size_t peer) { operation.exchange.send(peer, tag, input, size); });
  move(at(output, parts[peers.rank].offset), input, size);
  peers.each([&](size_t peer) {
    operation.exchange.receive(peer, tag, at(output, parts[peer].offset), parts[peer].size);
  });
}

void scatter(const Operation& operation, const void* input, void* output, size_t size, size_t root) {
  const Peers peers(operation);
  if (peers.rank == root) {
    send_parts(operation, input, equal_parts(size, peers.size));
    move(output, at(input, root * size), size);
  } else {
    operation.exchange.receive(root, in_round(operation.tag, Round::data), output, size);
  }
  acknowledge(operation, root);
}

void all_to_all(const Operation& operation, const void* input, const std::vector<Part>& sent,
                void* output, const std::vector<Part>& received) {
  const Tag tag = in_round(operation.tag, Round::data);
  const Peers peers(operation);
  send_parts(operation, input, sent);
  const size_t own = peers.rank;
  move(at(output, received[own].offset), at(input, sent[own].offset), received[own].size);
  peers.each([&](size_t peer) {
    operation.exchange.receive(peer, tag, at(output, received[peer].offset), received[peer].size);
  });
}

void all_reduce(const Operation& operation, const void* input, void* output, size_t count,
                Operands operands) {
  const Peers peers(operation);
  const size_t width = size_of(operands.type);
  const size_t chunk = chunk_of_all_reduce(count, width, peers.size);
  std::vector<Buffer> frames;
  if (count * width <= kOneRoundBytes) {
    send_parts(operation, input, std::vector<Part>(peers.size, {0, count * width}));
    reduce_range(gather_range(operation, input, frames), output, {0, count}, chunk, operands.type,
                 operands.reduction);
    return;
  }
  std::vector<Part> parts;
  for (size_t rank = 0; rank < peers.size; rank++) {
    const size_t begin = count * rank / peers.size;
    parts.push_back({begin * width, (count * (rank + 1) / peers.size - begin) * width});
  }
  send_parts(operation, input, parts);
  const Part own = parts[peers.rank];
  reduce_range(gather_range(operation, at(input, own.offset), frames), at(output, own.offset),
               {own.offset / width, own.size / width}, chunk, operands.type, operands.reduction);
  const Tag answer = in_round(operation.tag, Round::answer);
  peers.each([&](size_t peer) {
    operation.exchange.send(peer, answer, at(output, own.offset), own.size);
  });
  peers.each([&](size_t peer) {
    operation.exchange.receive(peer, answer, at(output, parts[peer].offset), parts[peer].size);
  });
}

void reduce(const Operation& operation, const void* input, void* output, size_t count, size_t root,
            Operands operands) {
  const Peers peers(operation);
  const size_t width = size_of(operands.type);
  if (peers.rank != root) {
    operation.exchange.send(root, in_round(operation.tag, Round::data), input, count * width);
    operation.exchange.receive(root, in_round(operation.tag, Round::answer));
    return;
  }
  std::vector<Buffer> frames;
  reduce_range(gather_range(operation, input, frames), output, {0, count},
               chunk_of_reduce(count, width, peers.size), operands.type, operands.reduction);
  const Tag answer = in_round(operation.tag, Round::answer);
  peers.each([&](size_t peer) { operation.exchange.send(peer, answer, nullptr, 0); });
}

void reduce_scatter(const Operation& operation, const void* input, const std::vector<Part>& parts,
                    void* output, Operands operands) {
  const Peers peers(operation);
  const size_t width = size_of(operands.type);
  size_t total = 0;
  for (const Part& part : parts) total = std::max(total, part.offset + part.size);
  send_parts(operation, input, parts);
  const Part own = parts[peers.rank];
  std::vector<Buffer> frames;
  // Gloo's reduce-scatter is an all-reduce of the whole, of which each rank takes its part.
  reduce_range(gather_range(operation, at(input, own.offset), frames), output,
               {own.offset / width, own.size / width},
               chunk_of_all_reduce(total / width, width, peers.size), operands.type,
               operands.reduction);
}

}  // namespace hccl
