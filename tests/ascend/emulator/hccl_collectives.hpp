// The collective operations, as functions that a stream runs. All ranks come to the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hccl_exchange.hpp"
#include "hccl_types.hpp"

namespace hccl {

// Where a rank's part lies in a buffer, in bytes.
struct Part {
  size_t offset;
  size_t size;
};

struct Operation {
  Communicator& communicator;
  Exchange& exchange;
  Tag tag;
};

struct Operands {
  DataType type;
  Reduction reduction;
};

void barrier(const Operation& operation);
void broadcast(const Operation& operation, void* buffer, size_t size, size_t root);
void all_gather(const Operation& operation, const void* input, size_t size, void* output,
                const std::vector<Part>& parts);
void scatter(const Operation& operation, const void* input, void* output, size_t size, size_t root);
void all_to_all(const Operation& operation, const void* input, const std::vector<Part>& sent,
                void* output, const std::vector<Part>& received);
void all_reduce(const Operation& operation, const void* input, void* output, size_t count,
                Operands operands);
void reduce(const Operation& operation, const void* input, void* output, size_t count, size_t root,
            Operands operands);
// `parts` are the ranks' parts of the input; this rank's one is its output.
void reduce_scatter(const Operation& operation, const void* input, const std::vector<Part>& parts,
                    void* output, Operands operands);

}  // namespace hccl
