// The operations of libhccl.so.
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "hccl_api.hpp"
#include "hccl_errors.hpp"
#include "hccl_operation.hpp"
#include "hccl_reduce.hpp"

using namespace hccl;

namespace {

bool check(const char* function, DataType type) {
  if (size_of(type) > 0) return true;
  report_parameter(function, "dataType", std::to_string(static_cast<int>(type)), "an HcclDataType");
  return false;
}

bool check(const char* function, DataType type, Reduction reduction) {
  if (is_reducible(type, reduction)) return true;
  report_parameter(function, "dataType and op",
                   std::to_string(static_cast<int>(type)) + " and " +
                       std::to_string(static_cast<int>(reduction)),
                   "int8, int16, int32, int64, fp16, fp32 or bfp16; no product of int16 and bfp16");
  return false;
}

size_t num_ranks(void* handle) {
  const auto communicator = find_communicator(handle);
  return communicator ? communicator->members.size() : 0;
}

bool check_root(const char* function, void* handle, uint32_t root) {
  if (root < num_ranks(handle)) return true;
  report_parameter(function, "root", std::to_string(root),
                   "less than " + std::to_string(num_ranks(handle)));
  return false;
}

// Counts and displacements in elements, one per rank, as parts in bytes.
std::vector<Part> parts_of(const void* counts, const void* displacements, size_t num, size_t width) {
  std::vector<Part> parts;
  for (size_t rank = 0; rank < num; rank++) {
    parts.push_back({static_cast<const uint64_t*>(displacements)[rank] * width,
                     static_cast<const uint64_t*>(counts)[rank] * width});
  }
  return parts;
}

std::vector<Part> equal_parts(uint64_t count, size_t num, size_t width) {
  std::vector<Part> parts;
  for (size_t rank = 0; rank < num; rank++) parts.push_back({rank * count * width, count * width});
  return parts;
}

uint64_t total(const std::vector<Part>& parts) {
  uint64_t sum = 0;
  for (const Part& part : parts) sum += part.size;
  return sum;
}

uint64_t detail(Reduction reduction, uint32_t root = 0) {
  return static_cast<uint64_t>(reduction) << 32 | root;
}

}  // namespace

HCCL_API Result HcclAllReduce(void* input, void* output, uint64_t count, DataType type,
                              Reduction reduction, void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclAllReduce", type, reduction)) return Result::not_supported;
  return submit(handle, stream, {"AllReduce", type, count, detail(reduction)},
                [=](const Operation& operation) {
                  all_reduce(operation, input, output, count, {type, reduction});
                });
}

HCCL_API Result HcclReduce(void* input, void* output, uint64_t count, DataType type,
                           Reduction reduction, uint32_t root, void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclReduce", type, reduction)) return Result::not_supported;
  if (!check_root("HcclReduce", handle, root)) return Result::parameter;
  return submit(handle, stream, {"Reduce", type, count, detail(reduction, root)},
                [=](const Operation& operation) {
                  reduce(operation, input, output, count, root, {type, reduction});
                });
}

HCCL_API Result HcclBroadcast(void* buffer, uint64_t count, DataType type, uint32_t root,
                              void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclBroadcast", type) || !check_root("HcclBroadcast", handle, root)) {
    return Result::parameter;
  }
  return submit(handle, stream, {"Broadcast", type, count, root}, [=](const Operation& operation) {
    broadcast(operation, buffer, count * size_of(type), root);
  });
}

HCCL_API Result HcclScatter(void* input, void* output, uint64_t count, DataType type, uint32_t root,
                            void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclScatter", type) || !check_root("HcclScatter", handle, root)) {
    return Result::parameter;
  }
  return submit(handle, stream, {"Scatter", type, count, root}, [=](const Operation& operation) {
    scatter(operation, input, output, count * size_of(type), root);
  });
}

HCCL_API Result HcclAllGather(void* input, void* output, uint64_t count, DataType type, void* handle,
                              void* stream) {
  HCCL_CALLED;
  if (!check("HcclAllGather", type)) return Result::parameter;
  const size_t width = size_of(type);
  const auto parts = equal_parts(count, num_ranks(handle), width);
  return submit(handle, stream, {"AllGather", type, count}, [=](const Operation& operation) {
    all_gather(operation, input, count * width, output, parts);
  });
}

HCCL_API Result HcclAllGatherV(void* input, uint64_t count, void* output, const void* counts,
                               const void* displacements, DataType type, void* handle,
                               void* stream) {
  HCCL_CALLED;
  if (!check("HcclAllGatherV", type)) return Result::parameter;
  const size_t width = size_of(type);
  const auto parts = parts_of(counts, displacements, num_ranks(handle), width);
  return submit(handle, stream, {"AllGatherV", type, total(parts)}, [=](const Operation& operation) {
    all_gather(operation, input, count * width, output, parts);
  });
}

HCCL_API Result HcclReduceScatter(void* input, void* output, uint64_t count, DataType type,
                                  Reduction reduction, void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclReduceScatter", type, reduction)) return Result::not_supported;
  const auto parts = equal_parts(count, num_ranks(handle), size_of(type));
  return submit(handle, stream, {"ReduceScatter", type, count, detail(reduction)},
                [=](const Operation& operation) {
                  reduce_scatter(operation, input, parts, output, {type, reduction});
                });
}

HCCL_API Result HcclReduceScatterV(void* input, const void* counts, const void* displacements,
                                   void* output, uint64_t, DataType type, Reduction reduction,
                                   void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclReduceScatterV", type, reduction)) return Result::not_supported;
  const auto parts = parts_of(counts, displacements, num_ranks(handle), size_of(type));
  return submit(handle, stream, {"ReduceScatterV", type, total(parts), detail(reduction)},
                [=](const Operation& operation) {
                  reduce_scatter(operation, input, parts, output, {type, reduction});
                });
}

HCCL_API Result HcclAlltoAll(const void* input, uint64_t sent, DataType type, void* output,
                             uint64_t received, DataType received_type, void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclAlltoAll", type) || !check("HcclAlltoAll", received_type)) {
    return Result::parameter;
  }
  const auto send = equal_parts(sent, num_ranks(handle), size_of(type));
  const auto receive = equal_parts(received, num_ranks(handle), size_of(received_type));
  return submit(handle, stream, {"AlltoAll", type, sent}, [=](const Operation& operation) {
    all_to_all(operation, input, send, output, receive);
  });
}

HCCL_API Result HcclAlltoAllV(const void* input, const void* sent, const void* sent_displacements,
                              DataType type, void* output, const void* received,
                              const void* received_displacements, DataType received_type,
                              void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclAlltoAllV", type) || !check("HcclAlltoAllV", received_type)) {
    return Result::parameter;
  }
  const size_t num = num_ranks(handle);
  const auto send = parts_of(sent, sent_displacements, num, size_of(type));
  const auto receive = parts_of(received, received_displacements, num, size_of(received_type));
  // No count: each rank's own differs.
  return submit(handle, stream, {"AlltoAllV", type, 0}, [=](const Operation& operation) {
    all_to_all(operation, input, send, output, receive);
  });
}

// The matrix has at [i][j] how many elements rank i sends to rank j; parts lie side by side.
HCCL_API Result HcclAlltoAllVC(const void* input, const void* matrix, DataType type, void* output,
                               DataType received_type, void* handle, void* stream) {
  HCCL_CALLED;
  if (!check("HcclAlltoAllVC", type) || !check("HcclAlltoAllVC", received_type)) {
    return Result::parameter;
  }
  const auto communicator = find_communicator(handle);
  if (!communicator) return Result::pointer;
  const size_t num = communicator->members.size();
  const auto* counts = static_cast<const uint64_t*>(matrix);
  std::vector<Part> send;
  std::vector<Part> receive;
  size_t sent = 0;
  size_t received = 0;
  for (size_t peer = 0; peer < num; peer++) {
    send.push_back({sent, counts[communicator->rank * num + peer] * size_of(type)});
    receive.push_back({received, counts[peer * num + communicator->rank] * size_of(received_type)});
    sent += send.back().size;
    received += receive.back().size;
  }
  return submit(handle, stream, {"AlltoAllVC", type, 0}, [=](const Operation& operation) {
    all_to_all(operation, input, send, output, receive);
  });
}

HCCL_API Result HcclBarrier(void* handle, void* stream) {
  HCCL_CALLED;
  return submit(handle, stream, {"Barrier", DataType::int8, 0}, barrier);
}

HCCL_API Result HcclSend(void* buffer, uint64_t count, DataType type, uint32_t peer, void* handle,
                         void* stream) {
  HCCL_CALLED;
  if (!check("HcclSend", type)) return Result::parameter;
  return submit_messages(handle, stream, "HcclSend", {{Direction::send, buffer, count, type, peer}});
}

HCCL_API Result HcclRecv(void* buffer, uint64_t count, DataType type, uint32_t peer, void* handle,
                         void* stream) {
  HCCL_CALLED;
  if (!check("HcclRecv", type)) return Result::parameter;
  return submit_messages(handle, stream, "HcclRecv",
                         {{Direction::receive, buffer, count, type, peer}});
}

HCCL_API Result HcclBatchSendRecv(SendReceive* items, uint32_t num_items, void* handle,
                                  void* stream) {
  HCCL_CALLED;
  for (uint32_t i = 0; i < num_items; i++) {
    if (!check("HcclBatchSendRecv", items[i].type)) return Result::parameter;
  }
  return submit_messages(handle, stream, "HcclBatchSendRecv", {items, items + num_items});
}
